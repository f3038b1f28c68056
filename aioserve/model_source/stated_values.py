"""What a model's files may state of it: which numbers its fields take, field by field.

Read before anything is computed with a value: what no model has is refused by the name of its
field, and not by an error of the arithmetic behind it. Fields that are in no table are not looked
at. Knows the names of config.json and those of GGUF files.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from aioserve.errors import ConfigError


class Rule(NamedTuple):
    """The values that a field may have."""

    words: str  # what is expected, as the end of a sentence
    holds: Callable[[Any], bool]  # of a value that is not None


def _is_whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    """Return whether the value is a finite number that a float can hold, and no flag."""
    return _is_whole(value) or (type(value) is float and math.isfinite(value))


COUNT = Rule("a whole number of at least 1", lambda value: _is_whole(value) and value >= 1)
NATURAL = Rule("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0)
POSITIVE = Rule("a number above 0", lambda value: _is_number(value) and value > 0)
AT_LEAST_0 = Rule("a number of at least 0", lambda value: _is_number(value) and value >= 0)
SHARE = Rule(
    "a number above 0 and of at most 1", lambda value: _is_number(value) and 0 < value <= 1
)
NUMBER = Rule("a finite number", _is_number)
WORD = Rule("a string", lambda value: isinstance(value, str))

#: Fields of config.json. None stands for a field that is not there; of a list, which some models
#: have with a value for each layer, every value is looked at.
CONFIG: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            *("hidden_size", "vocab_size", "max_position_embeddings", "n_positions", "n_embd"),
            *("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"),
            *("num_hidden_layers", "n_layer", "conv_kernel", "qk_head_dim"),
            *("qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "attention_chunk_size"),
            *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
            *(
                "linear_value_head_dim",
                "linear_conv_kernel_dim",
                "original_max_position_embeddings",
            ),
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            *(
                "sliding_window",
                "intermediate_size",
                "moe_intermediate_size",
                "num_local_experts",
                "num_experts",
            ),
            *("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "qk_nope_head_dim"),
            *(
                "first_k_dense_replace",
                "num_nextn_predict_layers",
                "shared_expert_intermediate_size",
            ),
        ),
        NATURAL,
    ),
    **dict.fromkeys(
        (
            *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
            *("rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta"),
            *("rotary_emb_base", "logits_scaling"),
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        ("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"), AT_LEAST_0
    ),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), SHARE),
    **dict.fromkeys(
        (
            *("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
            *("logit_scale", "routed_scaling_factor", "swiglu_limit"),
        ),
        NUMBER,
    ),
}

#: Fields of `rope_scaling` and `rope_parameters`, and of what these hold for each type of layer.
ROPE: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
            *("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
            *("short_factor", "long_factor"),
        ),
        POSITIVE,
    ),
    "partial_rotary_factor": SHARE,
    **dict.fromkeys(("mscale", "mscale_all_dim"), AT_LEAST_0),
    "mrope_section": NATURAL,
    **dict.fromkeys(("rope_type", "type"), WORD),
}

#: Kinds of rotary embeddings that `transformers` has, and the older names of two of them.
KINDS = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "llama3",
    "longrope",
    "proportional",
    "su",
    "mrope",
)

#: What each kind of scaled rotary embedding cannot do without.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}

#: Keys of a GGUF file, without the name of its architecture. Converters write 0 for some that mean
#: nothing then: those are not here.
GGUF: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            *("context_length", "embedding_length", "block_count", "vocab_size"),
            *("attention.key_length", "attention.value_length", "rope.dimension_count"),
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            *("feed_forward_length", "attention.head_count", "attention.head_count_kv"),
            *("expert_count", "expert_used_count", "expert_feed_forward_length"),
            *("leading_dense_block_count", "attention.sliding_window", "nextn_predict_layers"),
            *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"),
            *("ssm.group_count", "rope.scaling.original_context_length"),
        ),
        NATURAL,
    ),
    **dict.fromkeys(
        (
            *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
            *("attention.group_norm_epsilon", "rope.freq_base", "rope.freq_base_swa"),
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        (
            *("rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"),
            *("attn_logit_softcapping", "final_logit_softcapping"),
        ),
        AT_LEAST_0,
    ),
    **dict.fromkeys(
        ("logit_scale", "embedding_scale", "residual_scale", "attention.scale"), NUMBER
    ),
}


def check_stated(where: str, values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raise `ConfigError` for a value that its rule does not hold of; `where` it is stated is said
    before its field.
    """
    for name, rule in rules.items():
        stated = values.get(name)
        for value in stated if isinstance(stated, list) and stated else [stated]:
            if value is not None and not rule.holds(value):
                raise ConfigError(f"{where}: {name} is {value!r:.99}, which must be {rule.words}")


def check_config(where: str, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what config.json states of a text model and none can have. Code of
    the model (`auto_map`) may know other kinds of rotary embeddings.
    """
    check_stated(where, config, CONFIG)
    for name in ("rope_scaling", "rope_parameters"):
        stated = config.get(name)
        if stated is None:
            continue
        if not isinstance(stated, dict):
            raise ConfigError(f"{where}: {name} is {stated!r:.99}, which must be an object or null")
        for place, rope in _ropes(name, stated):
            _check_rope(f"{where}: {place}", rope, has_code="auto_map" in config)


def _ropes(name: str, stated: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parameters of all layers, and those of each type of layer, with their places."""
    yield name, stated
    for kind, rope in stated.items():
        if isinstance(rope, dict):
            yield f"{name}.{kind}", rope


def _check_rope(where: str, rope: dict[str, Any], *, has_code: bool) -> None:
    check_stated(where, rope, ROPE)
    for name in ("short_factor", "long_factor"):
        if not isinstance(rope.get(name, []), list):
            raise ConfigError(f"{where}: {name} is {rope[name]!r:.99}, which must be a list")
    kind = rope.get("rope_type", rope.get("type"))
    if kind is not None and kind not in KINDS and not has_code:
        raise ConfigError(
            f"{where}: rope_type is {kind!r:.99}, which must be one of {', '.join(KINDS)}"
        )
    for name in NEEDED.get(str(kind), ()):
        if rope.get(name) is None:
            raise ConfigError(f"{where}: rope_type is {kind!r}, which needs {name}")
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if kind == "llama3" and low is not None and high is not None and high <= low:
        raise ConfigError(
            f"{where}: high_freq_factor is {high!r}, which must be above low_freq_factor, {low!r}"
        )
