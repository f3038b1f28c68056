"""Every text decoder of `transformers`, tiny, with random weights that tell tokens apart.

Knows the fields of configurations by name, and what is special about some; knows no engine.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

VOCAB_SIZE = 256
MAX_LEN = 128

# Half of encoder-decoders, encoders that can be told to be decoders, models of images and sounds
# (their text decoders have types of their own), and what makes drafts from another model's states.
_OTHERS = """
    bart bigbird_pegasus blenderbot blenderbot-small marian mbart moshi musicgen musicgen_melody mvp
    pegasus plbart prophetnet trocr whisper

    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert
    roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod

    dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama
    moss_transcribe_diarize phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp

    gemma4_assistant gemma4_unified_assistant
"""
NOT_TEXT_DECODERS = frozenset(_OTHERS.split())

# By the name of a field, whatever the configuration; where a name is unknown it is left out.
_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # between the layers of MLPs, and experts
    "intermediate_size": 96,
    "ffn_dim": 96,
    "dff": 96,
    "ffn_hidden_size": 96,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_experts_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "zero_expert_num": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # attention to what is near, to pieces, to what an indexer chooses
    "sliding_window": 24,
    "sliding_window_size": 24,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "window_size": 24,
    "local_attention": 24,
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,  # with few, most scores are 0, and which are chosen is chance
    # attention by latent states
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # state spaces and linear attention
    "state_size": 16,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_group_size": 2,
    # names of one or two
    "rotary_dim": 8,
    "dim_head": 16,
    "dim_ff": 96,
    "kv_channels": 16,
    "max_seq_len": MAX_LEN,
    "no_rope_layer_interval": 2,
    "query_pre_attn_scalar": 16,
    "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 8,
    "o_lora_rank": 16,
    "gated_norm_rank": 8,
    "router_hidden_size": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "dim_model_base": 64,
}

_GEMMA4 = {
    "global_head_dim": 32,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
_BLT = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
# What a type needs besides.
_OF_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "patcher_config": _BLT,
        "encoder_config": _BLT | {"hidden_size_global": 64},
        "decoder_config": _BLT | {"hidden_size_global": 64},
        "global_config": {n: size for n, size in _BLT.items() if n != "vocab_size"},
        "encoder_hash_byte_group_vocab": 64,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "cpmant": {"prompt_length": 4, "position_bias_num_buckets": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "dots3_note_text": {
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_hidden_layers": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "interleave_moe_layer_step": 2,
    },
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ngram_vocab_size_base": 64,
        "heads_per_ngram": 2,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 48],
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    },
    "zaya": {"num_experts_per_tok": 1},
}


class Case(NamedTuple):
    """One architecture; some in several ways."""

    model_type: str
    way: str = ""
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """In the table, and of its test."""
        return f"{self.model_type} {self.way}".strip()


_OTHER_WAYS = [
    Case("falcon", "with ALiBi", (("alibi", True),)),
    Case(
        "falcon",
        "of 40B",
        (("new_decoder_architecture", True), ("num_kv_heads", 2)),
    ),
    Case(
        "gemma4_text",
        "without shared layers",
        (("num_kv_shared_layers", 0), ("hidden_size_per_layer_input", 0)),
    ),
    Case(
        "gemma4_text",
        "with experts",
        (("enable_moe_block", True), ("top_k_experts", 2)),
    ),
    Case("qwen2_moe", "without windows", (("use_sliding_window", False),)),
]


def cases() -> Iterator[Case]:
    """All text decoders of the installed `transformers`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING_NAMES))
    for model_type in known:
        if model_type not in NOT_TEXT_DECODERS:
            yield Case(model_type)
            yield from (case for case in _OTHER_WAYS if case.model_type == model_type)


def make_config(case: Case) -> Any:
    """A tiny configuration. Raises whatever `transformers` does if its numbers do not fit."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[case.model_type]
    aliases = getattr(kind, "attribute_map", {})
    own = {field.name for field in dataclasses.fields(kind)}
    known = own | set(aliases)
    fields = {name: value for name, value in _FIELDS.items() if name in known}
    if "kv_lora_rank" in known:  # every head has K and V of its own
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields |= _layers(kind, own) | _OF_TYPE.get(case.model_type, {}) | dict(case.fields)
    for alias, name in aliases.items():
        if alias in fields:
            fields.setdefault(name, fields.pop(alias))
    return AutoConfig.for_model(case.model_type, **fields)


def _layers(kind: Any, known: set[str]) -> dict[str, Any]:
    """How many, and by turns of all the types that there are by default."""
    if getattr(kind, "attribute_map", {}).get("layer_types", "layer_types") in known:
        by_default = list(dict.fromkeys(getattr(kind(), "layer_types", None) or ()))
        if len(by_default) > 1:
            num_layers = 2 * len(by_default)
            return {"num_hidden_layers": num_layers, "layer_types": by_default * 2}
    return {"num_hidden_layers": 3}


def make_model(config: Any, path: Path) -> None:
    """Write a model of `config` to `path`, with weights far from those that models start with."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.2)
            else:  # norms and biases: near what they are
                parameter.add_(noise * 0.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
