"""Mixtures of experts of GGUF files, by llama.cpp's names."""

from collections.abc import Mapping

from aioserve.model_source import gguf_layouts as layouts
from aioserve.model_source import gguf_stacked as stacked
from aioserve.model_source.gguf_config import (
    RMS,
    RMS_KEY,
    USUAL_WITHOUT_WIDTH,
    Architecture,
    Facts,
    biases,
)
from aioserve.model_source.gguf_dense import GRANITE, GRANITE_FIXED, glm4_facts, granite_facts
from aioserve.model_source.gguf_others import lfm2_facts

EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
#: Layers of experts as DeepSeek's: some shared, some layers dense, a sigmoid and a bias per expert.
_DEEP_EXPERTS = {
    **EXPERT_KEYS,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_DEEP_FIXED = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "first_k_dense_replace": 0,
}
_GATE_BIAS = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
_DENSE_WIDTH = ("feed_forward_length",)  # without effect where all layers are of experts
_SIGMOID = 2  # of `expert_gating_func`


def _gpt_oss(facts: Facts) -> None:
    facts.windows(2)
    width = facts.metadata.one("feed_forward_length")
    facts.fields["intermediate_size"] = facts.metadata.one("expert_feed_forward_length", width)
    facts.same_theta()
    rope = facts.fields["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as it is published; no key says it


def _lfm2_moe(facts: Facts) -> None:
    lfm2_facts(facts)
    facts.metadata.expect("expert_gating_func", lambda kind: kind == _SIGMOID, "2, a sigmoid,")
    facts.fields["use_expert_bias"] = facts.has("exp_probs_b.bias")


def _granite_moe(facts: Facts) -> None:
    granite_facts(facts)
    del facts.fields["mlp_bias"]
    if width := facts.metadata.get("expert_shared_feed_forward_length"):
        facts.fields["shared_intermediate_size"] = width


def _glm4_moe(facts: Facts) -> None:
    glm4_facts(facts)
    _deep(facts)
    facts.fields["use_qk_norm"] = facts.has("attn_q_norm.weight")
    # layers that predict further tokens stand behind the others, and are not used
    facts.fields["num_hidden_layers"] -= facts.metadata.get("nextn_predict_layers", 0)


def _deep(facts: Facts) -> None:
    facts.metadata.expect("expert_gating_func", lambda kind: kind == _SIGMOID, "2, a sigmoid,")


def _exaone_moe(facts: Facts) -> None:
    _deep(facts)
    facts.windows(4, 128)
    facts.same_theta()


def _hunyuan_moe(facts: Facts) -> None:
    """Its experts, and the one that all tokens share, are as wide as `feed_forward_length`."""
    width = facts.fields["intermediate_size"]
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        facts.metadata.expect(key, width.__eq__, str(width))
    facts.metadata.expect("expert_shared_count", lambda count: count == 1, "1")
    facts.fields["attention_bias"] = facts.has("attn_q.bias")


def _minimax(facts: Facts) -> None:
    facts.metadata.expect("expert_gating_func", lambda kind: kind == _SIGMOID, "2, a sigmoid,")
    width = facts.fields["intermediate_size"]
    facts.metadata.expect("expert_feed_forward_length", lambda n: n == width, str(width))
    facts.fields["rotary_dim"] = facts.metadata.get("rope.dimension_count", 64)


def _expert_width(facts: Facts) -> None:
    """Experts are as wide as `feed_forward_length`, whichever of the keys says it."""
    width = facts.metadata.one("feed_forward_length")
    facts.fields["intermediate_size"] = facts.metadata.one("expert_feed_forward_length", width)


EXPERTS: Mapping[str, Architecture] = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        keys={
            **RMS,
            **EXPERT_KEYS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        ignored=_DENSE_WIDTH,
        fixed={"use_sliding_window": False, "norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        keys={**RMS, **EXPERT_KEYS},
        ignored=_DENSE_WIDTH,
        fixed={"use_sliding_window": False, "norm_topk_prob": True},
    ),
    "qwen3vlmoe": Architecture(
        "qwen3_moe",
        keys={**RMS, **EXPERT_KEYS},
        ignored=(*_DENSE_WIDTH, "n_deepstack_layers"),
        fixed={"use_sliding_window": False, "norm_topk_prob": True},
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        keys={**RMS, "expert_count": "num_experts", "expert_used_count": "moe_topk"},
        more=_hunyuan_moe,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        keys={
            **RMS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        ignored=_DENSE_WIDTH,
        more=_gpt_oss,
        parts=stacked.gpt_oss,
        names={
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
        },
    ),
    "granitemoe": Architecture(
        lambda facts: (
            "granitemoeshared"
            if facts.metadata.get("expert_shared_feed_forward_length")
            else "granitemoe"
        ),
        keys={
            **GRANITE,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        fixed=GRANITE_FIXED,
        more=_granite_moe,
        layout=layouts.permuted,
        names={
            "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        },
    ),
    "olmoe": Architecture(
        "olmoe",
        keys={
            **RMS,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        fixed={"norm_topk_prob": False},
        more=_expert_width,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        keys={**RMS, **_DEEP_EXPERTS, "feed_forward_length": "intermediate_size"},
        # of Solar Open, all of whose layers have experts, no width of dense ones is stated
        fixed={**_DEEP_FIXED, "intermediate_size": 1},
        usual=USUAL_WITHOUT_WIDTH,
        turned="part",
        more=_glm4_moe,
        names=_GATE_BIAS,
    ),
    "dots1": Architecture(
        "dots1",
        keys={**RMS, **_DEEP_EXPERTS},
        fixed={**_DEEP_FIXED, "sliding_window": None},
        more=_deep,
        names=_GATE_BIAS,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        keys={
            **RMS,
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        fixed={"moe_layer_start_index": 0},
        # the shapes of the tensors say how wide shared experts are; the key says something else
        ignored=("expert_shared_feed_forward_length",),
        more=biases(use_bias="attn_q.bias"),
        names={"moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        keys={
            **RMS,
            **_DEEP_EXPERTS,
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
        },
        ignored=("expert_shared_feed_forward_length",),  # that of all shared experts together
        fixed=_DEEP_FIXED,
        more=_exaone_moe,
        names=_GATE_BIAS,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        keys={
            **RMS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        turned="part",
        more=_minimax,
        names={"mlp.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        keys={
            RMS_KEY: "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
            **EXPERT_KEYS,
            "leading_dense_block_count": "num_dense_layers",
        },
        fixed={"num_key_value_heads": None, "norm_topk_prob": True, "num_dense_layers": 0},
        more=_lfm2_moe,
        names={"feed_forward.expert_bias": "exp_probs_b.bias"},
    ),
}
