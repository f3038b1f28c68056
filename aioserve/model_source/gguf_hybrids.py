"""Mamba layers beside attention in GGUF files: Falcon-H1, Granite 4, Nemotron-H, Jamba."""

from collections.abc import Mapping
from typing import Any

from aioserve.model_source import gguf_layouts as layouts
from aioserve.model_source.gguf_config import LAYER_NORM, RMS, RMS_KEY, Architecture, Facts
from aioserve.model_source.gguf_config import USUAL_WITHOUT_WIDTH as WITHOUT_WIDTH
from aioserve.model_source.gguf_delta_net import inner_head_size, kind_of
from aioserve.model_source.gguf_dense import GRANITE, GRANITE_FIXED
from aioserve.model_source.gguf_rope import read_rope

#: Of a Mamba 2 layer, after `mamba_`.
_MAMBA2 = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_ROPE = ("rope.freq_base", "rope.dimension_count")  # without effect where nothing turns
_SIGMOID = 2  # of `expert_gating_func`


def _attention_where_stated(facts: Facts) -> list[bool]:
    """Which layers have K and V: those with heads of them. Sets `num_key_value_heads`."""
    counts = facts.metadata.each("attention.head_count_kv", facts.num_layers) or []
    others = {count for count in counts if count}
    if len(others) != 1:
        raise facts.metadata.refused("attention.head_count_kv", f"{counts!r:.99}")
    facts.fields["num_key_value_heads"] = others.pop()
    return [count > 0 for count in counts]


def _mamba2_biases(facts: Facts) -> None:
    facts.fields |= {
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
        "mamba_proj_bias": facts.has("ssm_in.bias"),
        "attention_bias": facts.has("attn_q.bias"),
    }


def _falcon_h1(facts: Facts) -> None:
    fields = facts.fields
    _mamba2_biases(facts)
    fields |= {
        "mamba_d_head": inner_head_size(facts, fields["mamba_n_heads"]),
        "mamba_d_ssm": facts.metadata.get("ssm.inner_size"),
        "mamba_rms_norm": facts.has("ssm_norm.weight"),
        "projectors_bias": facts.has("ssm_out.bias"),
        "mlp_bias": facts.has("ffn_down.bias"),
    }


def _granite_hybrid(facts: Facts) -> None:
    fields = facts.fields
    facts.metadata.need("expert_shared_feed_forward_length")
    attention = _attention_where_stated(facts)
    fields["layer_types"] = [kind_of(not has_kv) for has_kv in attention]
    _mamba2_biases(facts)
    fields["mamba_d_head"] = inner_head_size(facts, fields["mamba_n_heads"])
    inner = fields["mamba_n_heads"] * fields["mamba_d_head"]
    if inner % fields["hidden_size"]:
        raise facts.metadata.refused("ssm.inner_size", f"{inner}, no multiple of the width")
    fields["mamba_expand"] = inner // fields["hidden_size"]
    if fields["attention_multiplier"] is None:
        fields["attention_multiplier"] = fields["head_dim"] ** -0.5
    if not fields["num_local_experts"]:
        facts.metadata.expect("expert_used_count", lambda count: not count, "0")
    facts.metadata.expect("rope.scaling.finetuned", lambda turns: not turns, "false: no rotation")


def _turns(facts: Facts) -> bool:
    """Whether a file of `granitehybrid` is of Bamba, whose attention has a rotary embedding."""
    return bool(facts.metadata.get("rope.scaling.finetuned"))


def _granite_hybrid_or_bamba(facts: Facts) -> None:
    if not _turns(facts):
        _granite_hybrid(facts)
        return
    metadata, fields = facts.metadata, facts.fields
    for key, name in GRANITE.items():
        if name not in RMS.values():
            metadata.expect(key, lambda _: False, "no scale, as in Bamba,")
    for key in ("expert_count", "expert_used_count", "expert_shared_feed_forward_length"):
        metadata.expect(key, lambda count: not count, "0, as in Bamba,")
    attention = _attention_where_stated(facts)
    fields["attn_layer_indices"] = [layer for layer, has_kv in enumerate(attention) if has_kv]
    _mamba2_biases(facts)
    size, inner = fields["head_dim"], int(metadata.need("ssm.inner_size"))
    fields["mamba_d_head"] = inner_head_size(facts, fields["mamba_n_heads"])
    fields["mamba_expand"] = inner // fields["hidden_size"]
    turned = metadata.get("rope.dimension_count", size)
    fields["rope_parameters"] = read_rope(metadata, facts.rope_tensors, turned)
    fields["rope_parameters"]["partial_rotary_factor"] = turned / size


def _nemotron_h(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    attention = _attention_where_stated(facts)
    widths = metadata.each("feed_forward_length", facts.num_layers) or []
    rest = "moe" if facts.has("ffn_gate_inp.weight") else "mlp"
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    kinds = [
        "full_attention" if has_kv else rest if width else "linear_attention"
        for has_kv, width in zip(attention, widths, strict=True)
    ]
    fields["layers_block_type"] = kinds[: facts.num_layers]
    if len(own := {width for width in widths if width}) > 1:
        raise metadata.refused("feed_forward_length", f"{widths!r:.99}")
    fields["intermediate_size"] = next(iter(own), 0)
    eps = metadata.get(RMS_KEY, metadata.get(LAYER_NORM))
    fields["layer_norm_epsilon"] = metadata.need(RMS_KEY) if eps is None else eps
    fields |= {
        "mamba_head_dim": inner_head_size(facts, fields["mamba_num_heads"]),
        "use_conv_bias": facts.has("ssm_conv1d.bias"),
        "use_bias": facts.has("ssm_out.bias"),
        "mlp_bias": facts.has("ffn_up.bias"),
    }
    metadata.expect("expert_gating_func", lambda kind: kind == _SIGMOID, "2, a sigmoid,")


def _jamba(facts: Facts) -> None:
    attention = _attention_where_stated(facts)
    experts = [
        f"blk.{layer}.ffn_gate_inp.weight" in facts.tensors for layer in range(facts.num_layers)
    ]
    for name, layers in (("attn", attention), ("expert", experts)):
        period, offset = _period(layers)
        if [layer % period == offset for layer in range(facts.num_layers)] != layers:
            raise facts.metadata.refused("attention.head_count_kv", f"no period: {layers!r:.99}")
        facts.fields |= {f"{name}_layer_period": period, f"{name}_layer_offset": offset}
    inner, hidden = facts.metadata.need("ssm.inner_size"), facts.fields["hidden_size"]
    if inner % hidden:
        raise facts.metadata.refused("ssm.inner_size", f"{inner}, no multiple of {hidden}")
    facts.fields |= {
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
        "mamba_proj_bias": facts.has("ssm_in.bias"),
    }


def _period(layers: list[bool]) -> tuple[int, int]:
    """The distance from the first layer that is marked true to the next one, and the place of the
    first. Where none is marked, the distance is longer than the list.
    """
    places = [layer for layer, is_so in enumerate(layers) if is_so] or [len(layers)]
    following = places[1] if len(places) > 1 else max(len(layers), places[0]) + 1 + places[0]
    return following - places[0], places[0]


_NEMOTRON_H: dict[str, Any] = {
    "keys": {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
    },
    "ignored": (*_ROPE, LAYER_NORM),
    "fixed": {"num_key_value_heads": None},
    "usual": WITHOUT_WIDTH,
    "turned": "none",
    "more": _nemotron_h,
    "layout": layouts.hybrid,
    "stem": "backbone",
    "names": {
        "mixer.dt_bias": "ssm_dt.bias",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mixer.experts.up_proj": "ffn_up_exps.weight",
        "mixer.experts.down_proj": "ffn_down_exps.weight",
    },
}

HYBRIDS: Mapping[str, Architecture] = {
    "falcon-h1": Architecture(
        "falcon_h1",
        keys={**RMS, **_MAMBA2},
        # weights are multiplied by the multipliers of the configuration; llama.cpp gates first
        fixed={"mamba_norm_before_gate": False},
        more=_falcon_h1,
        layout=layouts.mamba,
        names={"mamba.dt_bias": "ssm_dt.bias"},
    ),
    "granitehybrid": Architecture(
        lambda facts: "bamba" if _turns(facts) else "granitemoehybrid",
        keys={
            **GRANITE,
            **_MAMBA2,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        ignored=_ROPE,
        fixed={
            **GRANITE_FIXED,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": None,
            "num_key_value_heads": None,
            "position_embedding_type": None,
        },
        turned="none",
        more=_granite_hybrid_or_bamba,
        layout=layouts.hybrid,
        names={
            "mamba.dt_bias": "ssm_dt.bias",
            "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
            "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        },
    ),
    "nemotron_h": Architecture("nemotron_h", **_NEMOTRON_H),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        **_NEMOTRON_H
        | {
            "keys": {
                **_NEMOTRON_H["keys"],
                "expert_count": "n_routed_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
                "expert_weights_norm": "norm_topk_prob",
                "expert_weights_scale": "routed_scaling_factor",
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
                "moe_latent_size": "moe_latent_size",
            },
            # the shapes of the tensors say how wide shared experts are together
            "ignored": (*_NEMOTRON_H["ignored"], "expert_shared_count"),
            "fixed": {
                **_NEMOTRON_H["fixed"],
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.0,
                "n_group": 1,
                "topk_group": 1,
                "moe_latent_size": None,
            },
        },
    ),
    "jamba": Architecture(
        "jamba",
        keys={
            **RMS,
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        fixed={"num_key_value_heads": None},
        turned="none",
        more=_jamba,
        layout=layouts.mamba,
    ),
}
