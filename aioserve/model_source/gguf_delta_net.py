"""Linear attention beside attention in GGUF files: Qwen3-Next and Qwen3.5, by llama.cpp's names."""

from collections.abc import Mapping

from aioserve.model_source import gguf_layouts as layouts
from aioserve.model_source import gguf_stacked as stacked
from aioserve.model_source.gguf_config import RMS, USUAL_WITHOUT_WIDTH, Architecture, Facts

_DELTA_NET = {
    **RMS,
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_DT_BIAS = {"linear_attn.dt_bias": "ssm_dt.bias"}
_DENSE_WIDTH = ("feed_forward_length",)  # without effect where all layers are of experts


def _delta_net(facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    fields["linear_value_head_dim"] = inner_head_size(facts, fields["linear_num_value_heads"])
    stated = metadata.each("attention.recurrent_layers", fields["num_hidden_layers"])
    fields["num_hidden_layers"] -= metadata.get("nextn_predict_layers", 0)
    every = metadata.get("full_attention_interval", 4)
    layers = range(facts.num_layers)
    linear = stated[: len(layers)] if stated else [(layer + 1) % every != 0 for layer in layers]
    fields["layer_types"] = [kind_of(is_linear) for is_linear in linear]


def kind_of(has_state: bool) -> str:
    """The type of a layer, for `layer_types`."""
    return "linear_attention" if has_state else "full_attention"


def inner_head_size(facts: Facts, heads: int) -> int:
    """The size of a head of states: `ssm.inner_size` by the number of `heads`. Raises `ConfigError`
    if it is no multiple of that.
    """
    inner = int(facts.metadata.need("ssm.inner_size"))
    if heads < 1 or inner % heads:
        raise facts.metadata.refused("ssm.inner_size", f"{inner}, no multiple of {heads} heads")
    return inner // heads


DELTA_NETS: Mapping[str, Architecture] = {
    "qwen3next": Architecture(
        "qwen3_next",
        keys={**_DELTA_NET, **_QWEN_EXPERTS},
        ignored=_DENSE_WIDTH,
        fixed={"norm_topk_prob": True},
        usual=USUAL_WITHOUT_WIDTH,
        turned="part",
        more=_delta_net,
        layout=layouts.delta_net,
        parts=stacked.delta_net,
        names=_DT_BIAS,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        keys=_DELTA_NET,
        turned="part",
        more=_delta_net,
        layout=layouts.tiled_delta_net,
        names=_DT_BIAS,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        keys={**_DELTA_NET, **_QWEN_EXPERTS},
        ignored=_DENSE_WIDTH,
        usual=USUAL_WITHOUT_WIDTH,
        turned="part",
        more=_delta_net,
        layout=layouts.tiled_delta_net,
        names=_DT_BIAS,
    ),
}
