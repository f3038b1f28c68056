"""Latent attention of GGUF files: DeepSeek 2 and 3, Kimi K2, GLM-4.7 Flash, Youtu.

llama.cpp has one name for them, `deepseek2`: how experts are chosen tells which it is.
"""

from collections.abc import Mapping
from typing import Any

from aioserve.model_source import gguf_stacked as stacked
from aioserve.model_source.gguf_config import RMS, Architecture, Facts
from aioserve.model_source.gguf_rope import read_rope

_SOFTMAX, _SIGMOID = 1, 2  # of `expert_gating_func`
_GATING = "expert_gating_func"


def _model_type(facts: Facts) -> str:
    facts.metadata.expect(_GATING, lambda kind: kind in (_SOFTMAX, _SIGMOID), "1 or 2")
    is_dense = not facts.has("ffn_gate_inp.weight")
    by_default = _SIGMOID if is_dense or facts.has("exp_probs_b.bias") else _SOFTMAX
    is_third = facts.metadata.get(_GATING, by_default) == _SIGMOID
    return "deepseek_v3" if is_third else "deepseek_v2"


def _facts(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    _heads(facts)
    fields["rope_parameters"] = rope = read_rope(
        metadata, facts.rope_tensors, fields["qk_rope_head_dim"]
    )
    if all_dims := rope.get("mscale_all_dim"):  # the converter writes a tenth of it
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * all_dims, 6)
    _experts(facts)


def _experts(facts: Facts) -> None:
    metadata, fields, groups = facts.metadata, facts.fields, facts.fields["n_group"]
    metadata.expect(
        "expert_group_used_count", lambda used: 0 < used <= groups, f"a number from 1 to {groups}"
    )
    if not facts.has("ffn_gate_inp.weight"):  # all layers are dense
        width = fields["intermediate_size"]
        metadata.expect("expert_feed_forward_length", width.__eq__, str(width))
        metadata.expect("expert_shared_count", lambda count: not count, "0")
    elif _model_type(facts) == "deepseek_v2":
        metadata.expect("expert_weights_norm", lambda is_normed: not is_normed, "false")
        fields["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"


def _heads(facts: Facts) -> None:
    """Files of today have keys and values of latent states for all heads in common; older ones
    those of each head.
    """
    metadata, fields = facts.metadata, facts.fields
    rope, rank = metadata.need("rope.dimension_count"), fields["kv_lora_rank"]
    end, expected = "", {"attention.head_count_kv": fields["num_attention_heads"]}
    if facts.has("attn_k_b.weight"):
        end = "_mla"
        expected = {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
        }
    for key, value in expected.items():
        metadata.expect(key, value.__eq__, str(value))
    fields |= {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": metadata.need(f"attention.key_length{end}") - rope,
        "v_head_dim": metadata.need(f"attention.value_length{end}"),
        "num_key_value_heads": fields["num_attention_heads"],
    }


_KEYS = {
    **RMS,
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
#: What an absent key means; of a model without experts there is none.
_FIXED: Mapping[str, Any] = {
    "q_lora_rank": None,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_mtp_layers": 0,
}


def _sparse_facts(facts: Facts) -> None:
    """An indexer chooses the tokens that a layer looks at (DeepSeek 3.2, GLM 5)."""
    metadata, fields = facts.metadata, facts.fields
    metadata.expect(_GATING, lambda kind: kind == _SIGMOID, "2, a sigmoid,")
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    _heads(facts)
    fields["rope_parameters"] = read_rope(metadata, facts.rope_tensors, fields["qk_rope_head_dim"])
    groups = fields["n_group"]
    metadata.expect(
        "expert_group_used_count", lambda used: 0 < used <= groups, f"a number from 1 to {groups}"
    )


def _glm_dsa(facts: Facts) -> None:
    _sparse_facts(facts)
    kinds = facts.metadata.each("attention.indexer.types", facts.num_layers)
    if kinds is not None:
        facts.fields["indexer_types"] = ["full" if is_full else "shared" for is_full in kinds]


def _deepseek32(facts: Facts) -> None:
    _sparse_facts(facts)
    if all_dims := facts.fields["rope_parameters"].get("mscale_all_dim"):
        rope = facts.fields["rope_parameters"]
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * all_dims, 6)


_SPARSE: dict[str, Any] = {
    "keys": {
        **_KEYS,
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    },
    "fixed": _FIXED,
    "heads": "own",
    "turned": "none",
    "parts": stacked.latent,
    "named_as": "glm-dsa",
    "names": {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
}

LATENT: Mapping[str, Architecture] = {
    "deepseek2": Architecture(
        _model_type,
        keys=_KEYS,
        fixed=_FIXED,
        heads="own",
        turned="none",
        more=_facts,
        parts=stacked.latent,
        names={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "deepseek32": Architecture("deepseek_v32", more=_deepseek32, **_SPARSE),
    "glm-dsa": Architecture("glm_moe_dsa", more=_glm_dsa, **_SPARSE),
}
