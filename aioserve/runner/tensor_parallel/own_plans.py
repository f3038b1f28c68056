"""Plans for sharing models of which `transformers` says none, by the type of the model.

In the words of its plans: what each linear layer keeps on a rank. Knows names of modules alone.
"""

from typing import Any

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
    """A layer with a state, which every rank has whole: some of the weights around it."""
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
    """The plan for the body of a model, by patterns; empty if there is none."""
    return _PLANS.get(hf_config.model_type, {})


def own_plan_of(module: Any) -> dict[str, str]:
    """The plan for a whole model with a head, by patterns; empty if there is none."""
    plan = own_plan(module.config)
    body = getattr(module, "base_model_prefix", "model")
    return {f"{body}.{name}": style for name, style in plan.items()} | (_HEAD if plan else {})


MODEL_TYPES = frozenset(_PLANS)  # which have a plan here
