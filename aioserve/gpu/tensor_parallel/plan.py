"""How a model is shared out, as `transformers` or we say it, and what cannot be: told at the door.

Begins with plans of ours by the type of the model, in the words of `transformers`' plans: what
each linear layer keeps on a rank. Knows names of modules alone.
"""

import re
from collections.abc import Callable
from typing import Any

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo

_COLUMNS, _ROWS = "colwise", "rowwise"
#: Outputs are shared and fetched, inputs are whole and shared: what lies between is on every rank.
_JOINED, _SPLIT = "colwise_gather_output", "rowwise_split_input"

_HEAD = {"lm_head": _JOINED}
_QKV = ("q_proj", "k_proj", "v_proj")


def _attention(output: str) -> dict[str, str]:
    """Each rank has some of the heads."""
    return {f"layers.*.self_attn.{name}": _COLUMNS for name in _QKV} | {
        f"layers.*.self_attn.{output}": _ROWS
    }


def _whole_attention(output: str) -> dict[str, str]:
    """Each rank has all heads, because the module counts them, and some of the weights."""
    return {f"layers.*.self_attn.{name}": _JOINED for name in _QKV} | {
        f"layers.*.self_attn.{output}": _SPLIT
    }


def _mlp(name: str, wide: tuple[str, ...], narrow: str) -> dict[str, str]:
    return {f"layers.*.{name}.{own}": _COLUMNS for own in wide} | {
        f"layers.*.{name}.{narrow}": _ROWS
    }


def _mixer(name: str) -> dict[str, str]:
    """Return a layer with a state, which every rank has whole: some of the weights around it."""
    return {f"layers.*.{name}.in_proj": _JOINED, f"layers.*.{name}.out_proj": _SPLIT}


_GATED = ("gate_proj", "up_proj")
_MAMBA = _mixer("mixer")
_PLANS: dict[str, dict[str, str]] = {
    "bamba": _attention("o_proj") | _mlp("feed_forward", _GATED, "down_proj") | _mixer("mamba"),
    "falcon_h1": _attention("o_proj") | _mlp("feed_forward", _GATED, "down_proj") | _mixer("mamba"),
    "falcon_mamba": _MAMBA,
    "gpt_oss": _attention("o_proj")
    | {
        "layers.*.self_attn": "local_params",
        "layers.*.self_attn.sinks": _COLUMNS,
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    "hunyuan_v1_dense": _attention("o_proj") | _mlp("mlp", _GATED, "down_proj"),
    "lfm2": _attention("out_proj") | _mlp("feed_forward", ("w1", "w3"), "w2") | _mixer("conv"),
    "lfm3": _attention("o_proj")
    | {"layers.*.self_attn.g_proj": _COLUMNS}
    | _mlp("feed_forward", ("w1", "w3"), "w2")
    | _mixer("conv"),
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "opt": {
        f"decoder.{name}": style
        for name, style in {
            **_whole_attention("out_proj"),
            "layers.*.fc1": _COLUMNS,
            "layers.*.fc2": _ROWS,
        }.items()
    },
    "stablelm": _whole_attention("o_proj") | _mlp("mlp", _GATED, "down_proj"),
}


def own_plan(hf_config: Any) -> dict[str, str]:
    """Return the plan for the body of a model, by patterns; empty if there is none."""
    return _PLANS.get(hf_config.model_type, {})


def own_plan_of(module: Any) -> dict[str, str]:
    """Return the plan for a whole model with a head, by patterns; empty if there is none."""
    plan = own_plan(module.config)
    body = getattr(module, "base_model_prefix", "model")
    return {f"{body}.{name}": style for name, style in plan.items()} | (_HEAD if plan else {})


MODEL_TYPES = frozenset(_PLANS)  # which have a plan here


# How a model is shared out, as `transformers` or we say it, and what cannot be: told at the door.
# Knows names of modules and numbers of heads; touches no weights.


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
    """Return whether a rank has some of the heads, with their K and V; else each has all."""
    plan = plan_in_config(hf_config)
    shared = [key for key, style in plan.items() if style == "colwise"]
    return any("attention" in key or "attn" in key for key in shared)


def plan_in_config(hf_config: Any) -> dict[str, str]:
    """Return the plan for an architecture, by patterns, ours or of `transformers`; empty: it has
    none.
    """
    return own_plan(hf_config) or getattr(hf_config, "base_model_tp_plan", None) or {}


def _styles(module: Any) -> Callable[[str], str | None]:
    """Return the style of a module or parameter, by its name."""
    patterns = own_plan_of(module) or module.tp_plan
    return lambda name: patterns.get(re.sub(r"\b\d+\b", "*", name))


def plan_of(module: Any) -> dict[str, str]:
    """Return the style of each module that is shared, by its name."""
    style_of, found = _styles(module), {}
    for name, _ in module.named_modules():
        style = style_of(name)
        if style is not None and style not in (*_WHOLE, _OF_PARAMETERS):
            found[name] = _SYNONYMS.get(style, style)
    return found


def vectors_of(module: Any) -> list[str]:
    """Return the names of the parameters with a number for each of the heads that are shared."""
    style_of = _styles(module)
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.dim() == 1 and style_of(name) == "colwise"
    ]
