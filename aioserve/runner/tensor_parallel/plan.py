"""How a model is shared out, as `transformers` or we say it, and what cannot be: told at the door.

Knows names of modules and numbers of heads; touches no weights.
"""

import re
from collections.abc import Callable
from typing import Any

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo
from aioserve.runner.tensor_parallel.own_plans import own_plan, own_plan_of

#: What a plan may say of a linear layer, in the words of `transformers`; see `shard`.
STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
_SYNONYMS = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
# Every rank keeps all of these. An embedding, too, whatever the plan says: to look a row up costs
# nothing, while a sum over ranks costs as much as one in a layer.
_WHOLE = (
    *("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"),  # unlike only in training
    *("embedding_rowwise", "embedding_colwise"),
)
#: Of a module with the weights of all experts: each expert is shared as a gated MLP is.
EXPERTS = "moe_tp_experts"
# In which the plan tells the weights, whichever of their dimensions comes first.
_IN_EXPERTS = {
    "gate_up_proj": ("packed_colwise", "packed_rowwise"),
    "down_proj": ("rowwise", "colwise"),
}
_OF_PARAMETERS = "local_params"  # such as sinks of heads, which have a style of their own


def check_settings(config: EngineConfig) -> None:
    """Raise `ConfigError` for what does not go with ranks, whatever the model is."""
    ranks = f"runner.tensor_parallel_size is {config.runner.tensor_parallel_size}"
    threads, size = config.runner.threads, config.runner.tensor_parallel_size
    if threads is not None and threads % size:
        raise ConfigError(
            f"{ranks}, and they share runner.threads: give a multiple of {size}, not {threads}"
        )


def check_model(config: EngineConfig, info: ModelInfo) -> None:
    """Raise `ConfigError` for a model that cannot be shared out as the settings ask.

    Before its weights are read; `transformers` is loaded.
    """
    size = config.runner.tensor_parallel_size
    ranks = f"runner.tensor_parallel_size is {size}, but"
    hf_config = info.hf_config
    body = plan_in_config(hf_config)
    name = (getattr(hf_config, "architectures", None) or [type(hf_config).__name__])[0]
    styles = {_SYNONYMS.get(style, style) for style in body.values()}
    if not styles & set(STYLES):
        raise ConfigError(f"{ranks} there is no plan for {name}, here or in transformers")
    for module, style in body.items():
        owner, _, own = module.rpartition(".")
        if body.get(owner) == EXPERTS and style in _IN_EXPERTS.get(own, ()):
            continue
        if _SYNONYMS.get(style, style) not in (*STYLES, *_WHOLE, EXPERTS, _OF_PARAMETERS):
            raise ConfigError(
                f"{ranks} the plan for {name} shares {module} as {style!r}, not served"
            )
    if not shares_heads(hf_config):
        return
    heads = hf_config.num_attention_heads
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    for count, what in (
        (kv_heads, "KV heads"),
        (heads, "attention heads"),
        (getattr(hf_config, "intermediate_size", size), "numbers between the layers of its MLP"),
        (
            getattr(hf_config, "moe_intermediate_size", size),
            "numbers between the layers of experts",
        ),
    ):
        if not isinstance(count, int) or count % size:
            raise ConfigError(f"{ranks} {name} has {count} {what}, which is no multiple of it")


def shares_heads(hf_config: Any) -> bool:
    """Whether a rank has some of the heads, with their K and V; else each has all."""
    plan = plan_in_config(hf_config)
    shared = [key for key, style in plan.items() if style == "colwise"]
    return any("attention" in key or "attn" in key for key in shared)


def plan_in_config(hf_config: Any) -> dict[str, str]:
    """The plan for an architecture, by patterns, ours or of `transformers`; empty: it has none."""
    return own_plan(hf_config) or getattr(hf_config, "base_model_tp_plan", None) or {}


def _styles(module: Any) -> Callable[[str], str | None]:
    """The style of a module or parameter, by its name."""
    patterns = own_plan_of(module) or module.tp_plan
    return lambda name: patterns.get(re.sub(r"\b\d+\b", "*", name))


def plan_of(module: Any) -> dict[str, str]:
    """The style of each module that is shared, by its name."""
    style_of, found = _styles(module), {}
    for name, _ in module.named_modules():
        style = style_of(name)
        if style is not None and style not in (*_WHOLE, _OF_PARAMETERS):
            found[name] = _SYNONYMS.get(style, style)
    return found


def vectors_of(module: Any) -> list[str]:
    """The names of the parameters with a number for each of the heads that are shared."""
    style_of = _styles(module)
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.dim() == 1 and style_of(name) == "colwise"
    ]
