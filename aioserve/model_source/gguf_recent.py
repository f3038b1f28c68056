"""Further dense decoders of GGUF files, by llama.cpp's names."""

from collections.abc import Mapping

from aioserve.model_source import gguf_layouts as layouts
from aioserve.model_source.gguf_config import LAYER_NORM, RMS, Architecture, Facts, biases
from aioserve.model_source.gguf_dense import GRANITE, GRANITE_FIXED, granite_facts, llama_facts
from aioserve.model_source.gguf_rope import read_rope

#: MiniCPM's scales, of which its files say nothing, or not all.
_EMBEDDING_SCALE, _DEPTH_SCALE, _BASE_WIDTH = 12.0, 1.4, 256
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def _minicpm(facts: Facts) -> None:
    fields = facts.fields
    if fields["residual_multiplier"] is None:
        fields["residual_multiplier"] = _DEPTH_SCALE / facts.num_layers**0.5
    if fields["logits_scaling"] is None:
        fields["logits_scaling"] = fields["hidden_size"] / _BASE_WIDTH
    granite_facts(facts)


def _minicpm3(facts: Facts) -> None:
    """Latent attention; the sizes of values are those of the tensors."""
    metadata, fields = facts.metadata, facts.fields
    turned, heads = metadata.need("rope.dimension_count"), fields["num_attention_heads"]
    metadata.expect("attention.head_count_kv", heads.__eq__, str(heads))
    inputs = facts.tensors.get("blk.0.attn_output.weight", (0, 0))[1]
    fields |= {
        "num_key_value_heads": heads,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": metadata.need("attention.key_length") - turned,
        "v_head_dim": inputs // heads,
        "rope_parameters": read_rope(metadata, facts.rope_tensors, turned),
    }
    metadata.expect("attention.value_length", fields["v_head_dim"].__eq__, "that of its tensors")


def _granite_swa(facts: Facts) -> None:
    facts.windows(4)
    facts.same_theta()
    granite_facts(facts)
    if facts.metadata.get("expert_count"):
        del facts.fields["mlp_bias"]
        facts.fields |= {
            "num_local_experts": facts.metadata.get("expert_count"),
            "num_experts_per_tok": facts.metadata.need("expert_used_count"),
            "shared_intermediate_size": facts.metadata.get("expert_shared_feed_forward_length", 0),
        }


RECENT: Mapping[str, Architecture] = {
    "apertus": Architecture(
        "apertus",
        more=biases(attention_bias="attn_q.bias"),
        numbers={f"mlp.act_fn.{name}": f"xielu.{name}" for name in _XIELU},
    ),
    "exaone": Architecture("llama", more=llama_facts),
    "granite_swa": Architecture(
        lambda facts: "granitemoe_swa" if facts.metadata.get("expert_count") else "granite_swa",
        keys=GRANITE,
        fixed=GRANITE_FIXED,
        more=_granite_swa,
        layout=layouts.permuted,
        named_as="granite",
        names={
            "self_attn.sinks": "attn_sinks.weight",
            "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
            "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        },
    ),
    "internlm2": Architecture("llama", more=llama_facts, layout=layouts.permuted),
    "jais2": Architecture(
        "jais2",
        keys={LAYER_NORM: "layer_norm_eps"},
        more=biases(attention_bias="attn_q.bias", mlp_bias="ffn_down.bias"),
    ),
    "minicpm": Architecture(
        "granite",
        keys={key: name for key, name in GRANITE.items() if key != "attention.scale"},
        fixed=GRANITE_FIXED
        | {
            "embedding_multiplier": _EMBEDDING_SCALE,
            "residual_multiplier": None,
            "logits_scaling": None,
        },
        more=_minicpm,
        layout=layouts.permuted,
    ),
    "minicpm3": Architecture(
        "minicpm3",
        keys={
            **RMS,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
        },
        fixed={
            "scale_emb": _EMBEDDING_SCALE,
            "scale_depth": _DEPTH_SCALE,
            "dim_model_base": _BASE_WIDTH,
        },
        heads="own",
        turned="none",
        more=_minicpm3,
    ),
}
