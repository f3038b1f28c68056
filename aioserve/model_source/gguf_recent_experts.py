"""Further mixtures of experts of GGUF files, by llama.cpp's names."""

from collections.abc import Mapping

from aioserve.model_source import gguf_stacked as stacked
from aioserve.model_source.gguf_config import (
    LAYER_NORM,
    RMS,
    USUAL_WITHOUT_WIDTH,
    Architecture,
    Facts,
)
from aioserve.model_source.gguf_experts import EXPERT_KEYS

_SIGMOID = 2  # of `expert_gating_func`
_SOFTMAX = 1
_NO_KEY_NORMS = 128  # experts of the one Llama 4 that does not normalize queries and keys


def _normed_sigmoid(facts: Facts) -> None:
    facts.metadata.expect("expert_gating_func", lambda kind: kind == _SIGMOID, "2, a sigmoid,")
    if not facts.metadata.need("expert_weights_norm"):
        raise facts.metadata.refused("expert_weights_norm", "false; shares that add up are served")


def _layers_of_experts(facts: Facts) -> list[str]:
    """For `mlp_layer_types`: which layers have a router."""
    routers = (f"blk.{layer}.ffn_gate_inp.weight" for layer in range(facts.num_layers))
    return ["sparse" if router in facts.tensors else "dense" for router in routers]


def _afmoe(facts: Facts) -> None:
    _normed_sigmoid(facts)
    facts.windows(4)
    facts.same_theta()
    facts.fields["attention_bias"] = facts.has("attn_q.bias")


def _hy_v3(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    _normed_sigmoid(facts)
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    fields["mlp_layer_types"] = _layers_of_experts(facts)
    fields["attention_bias"] = facts.has("attn_q.bias")
    fields["mlp_bias"] = facts.has("ffn_down.bias")
    width = fields["moe_intermediate_size"]
    shared = metadata.get("expert_shared_feed_forward_length", width)
    if shared % width:
        raise metadata.refused("expert_shared_feed_forward_length", f"{shared} for {width} each")
    fields["num_shared_experts"] = shared // width
    dense = fields["mlp_layer_types"].index("sparse") if facts.has("ffn_gate_inp.weight") else 0
    metadata.expect("leading_dense_block_count", dense.__eq__, str(dense))


def _llama4(facts: Facts) -> None:
    """Chunks, layers without rotation and scales of late tokens are those of all published ones."""
    facts.metadata.expect("attention.sliding_window", lambda _: False, "none: its chunks of 8192")
    facts.same_theta()
    facts.fields["use_qk_norm"] = facts.fields["num_local_experts"] != _NO_KEY_NORMS
    facts.fields["attention_bias"] = facts.has("attn_q.bias")


def _mellum(facts: Facts) -> None:
    facts.windows(4)
    facts.rope_by_type()
    facts.fields["mlp_layer_types"] = _layers_of_experts(facts)
    facts.fields["attention_bias"] = facts.has("attn_q.bias")


def _cohere2_moe(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    metadata.expect("expert_gating_func", lambda kind: kind in (_SOFTMAX, _SIGMOID), "1 or 2")
    is_sigmoid = metadata.get("expert_gating_func", _SOFTMAX) == _SIGMOID
    fields["expert_selection_fn"] = "sigmoid" if is_sigmoid else "softmax"
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    facts.windows(4)
    facts.same_theta()
    metadata.expect("leading_dense_block_count", lambda count: count == 0, "0")
    fields["mlp_layer_types"] = _layers_of_experts(facts)
    shared = fields["num_shared_experts"] * fields["intermediate_size"]
    metadata.expect("expert_shared_feed_forward_length", shared.__eq__, str(shared))


RECENT_EXPERTS: Mapping[str, Architecture] = {
    "afmoe": Architecture(
        "afmoe",
        keys={
            **RMS,
            **EXPERT_KEYS,
            "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "route_scale",
            "leading_dense_block_count": "num_dense_layers",
        },
        # llama.cpp multiplies embeddings by the root of their width
        fixed={"route_scale": 1.0, "num_dense_layers": 0, "mup_enabled": True},
        more=_afmoe,
        names={"mlp.expert_bias": "exp_probs_b.bias"},
    ),
    "cohere2moe": Architecture(
        "cohere2_moe",
        keys={
            **EXPERT_KEYS,
            LAYER_NORM: "layer_norm_eps",
            "logit_scale": "logit_scale",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": "num_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
        },
        fixed={"num_shared_experts": 0, "norm_topk_prob": False},
        usual=USUAL_WITHOUT_WIDTH,
        more=_cohere2_moe,
        named_as="dots1",
    ),
    "hy_v3": Architecture(
        "hy_v3",
        keys={**RMS, **EXPERT_KEYS, "expert_weights_scale": "router_scaling_factor"},
        fixed={"router_scaling_factor": 1.0},
        more=_hy_v3,
        named_as="dots1",
        names={"mlp.e_score_correction_bias": "exp_probs_b"},
    ),
    "llama4": Architecture(
        "llama4_text",
        keys={
            **RMS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        usual={**USUAL_WITHOUT_WIDTH, "feed_forward_length": "intermediate_size_mlp"},
        more=_llama4,
        parts=stacked.llama4,
        packs_experts=False,
    ),
    "mellum": Architecture(
        "mellum",
        keys={**RMS, **EXPERT_KEYS},
        fixed={"norm_topk_prob": True},
        ignored=("feed_forward_length",),  # without effect where all layers are of experts
        more=_mellum,
        named_as="qwen3moe",
    ),
}
