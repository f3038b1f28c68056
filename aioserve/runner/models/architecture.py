"""Which architectures can be served, and which configurations make sense, before weights are read.

Reads `transformers` configurations, and of weights only how many there are.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import FAMILIES
from aioserve.runner.models.long_rope import check_rope

if TYPE_CHECKING:
    pass


_SERVED_LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "attention",
}
# Where the model's code keeps what such layers remember in the cache that it is given.
_STATE_LAYER_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_STATE_CALLS = ("update_conv_state", "update_recurrent_state", "set_linear_cache")
_OTHER_LAYER_TYPES = {"moe", "mlp"}
# What is read of a model as a whole.
_MUST_NOT_DIFFER = {"hidden_size", "vocab_size", "max_position_embeddings", "sliding_window"}

_MOST_POSITIONS = 1 << 25  # tables of angles are as long


def check_architecture(info: ModelInfo) -> None:
    """Raise `ConfigError` that names an architecture which cannot be served, and why."""
    config = _read(info)
    reason = _why_unsupported(config, info.hf_config, has_states(info))
    if reason is not None:
        raise ConfigError(f"unsupported architecture {_name(config)}: {reason}")
    wrong = _what_is_wrong(info.hf_config) or _what_does_not_fit(info)
    if wrong is not None:
        raise _makes_no_sense(info, wrong)
    check_rope(info.hf_config, info.max_model_len)


def has_states(info: ModelInfo) -> bool:
    """Return whether layers of the model remember a text in a fixed size, as far as its code
    says.
    """
    config = info.whole_config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    assert module.__file__ is not None
    code = Path(module.__file__).read_text(encoding="utf-8")
    return any(f".{call}(" in code for call in _STATE_CALLS)


def _read(info: ModelInfo) -> Any:
    """Return the whole configuration. Raises `ConfigError`."""
    try:
        return info.whole_config
    except ConfigError:  # `transformers` computes with what makes no sense: say what that is
        wrong = _what_is_wrong(SimpleNamespace(**info.source.known_config))
        if wrong is not None:
            raise _makes_no_sense(info, wrong) from None
        stated = info.source.known_config.get("layer_types")
        if not isinstance(stated, list) or not all(isinstance(kind, str) for kind in stated):
            raise
        unknown = sorted(set(stated) - set(ALLOWED_LAYER_TYPES))
        if not unknown:
            raise
        # `transformers` lists all that it knows, and all layers
        wrong = f"layers of type {', '.join(unknown)} are unknown to transformers"
        raise _makes_no_sense(info, wrong) from None


def _makes_no_sense(info: ModelInfo, wrong: str) -> ConfigError:
    return ConfigError(f"the configuration of {info.config.model} makes no sense: {wrong}")


def _why_unsupported(config: Any, text_config: Any, has_states: bool) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models are not served"
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if getattr(model_class, "_is_stateful", False) and not has_states:
            return "its layers keep states in a way of their own, which is not served"
    elif config.model_type not in FAMILIES and not hasattr(config, "auto_map"):
        return "it is not a causal language model of transformers"
    differing = set(getattr(text_config, "per_layer_attributes", None) or ()) & _MUST_NOT_DIFFER
    if differing:
        return f"layers that differ in {', '.join(sorted(differing))} are not served"
    other = set(_layer_types(text_config) or ()) - _SERVED_LAYER_TYPES
    if has_states:
        other -= _STATE_LAYER_TYPES | _OTHER_LAYER_TYPES
    if other:
        return f"layers of type {', '.join(sorted(other))} are not served"
    return None


# The least and the most that makes sense; models of today are below a hundredth of the latter.
_RANGES = {
    "vocab_size": (1, 1 << 28),
    "hidden_size": (1, 1 << 22),
    "num_hidden_layers": (1, 1 << 14),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 16),
    "num_experts_per_tok": (0, 1 << 12),  # 0: of Granite 4 without experts
    "sliding_window": (0, 1 << 62),  # 0: of Qwen2-MoE without `use_sliding_window`
    "attention_chunk_size": (1, 1 << 62),
    # Of layers that keep states, by all the names that they have.
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), (1, 1 << 16)),
    **dict.fromkeys(("conv_kernel", "conv_L_cache", "linear_conv_kernel_dim"), (1, 1 << 12)),
    **dict.fromkeys(("mamba_d_conv", "short_conv_kernel_size"), (1, 1 << 12)),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), (1, 1 << 20)),
}


# Of a power of the first, below 0, attention would compute with complex numbers.
_NOT_NEGATIVE = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


def _what_is_wrong(config: Any) -> str | None:
    """Numbers that are absurd, or contradict each other."""
    for name, (least, most) in _RANGES.items():
        value = _stated(config, name)
        if value is None or isinstance(value, list | tuple):  # some have one per layer
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            return f"{name} is {value!r}, not a number from {least} to {most}"
    num_experts = _stated(config, "num_local_experts") or _stated(config, "num_experts")
    if num_experts and _stated(config, "num_experts_per_tok") == 0:
        return f"num_experts_per_tok is 0, but there are {num_experts} experts"
    heads, kv_heads = _stated(config, "num_attention_heads"), _stated(config, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        return f"num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}"
    for name in _NOT_NEGATIVE:
        value = _stated(config, name)
        if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
            return f"{name} is {value!r:.99}, not a number from 0 on"
    layer_types = _layer_types(config)
    if layer_types is None:
        return f"layer_types is {_stated(config, 'layer_types')!r:.99}, not a list of names"
    num_layers = _stated(config, "num_hidden_layers")
    if layer_types and isinstance(num_layers, int) and len(layer_types) != num_layers:
        return f"num_hidden_layers is {num_layers}, but layer_types has {len(layer_types)}"
    for layer_type, size in (
        ("sliding_attention", "sliding_window"),
        ("chunked_attention", "attention_chunk_size"),
    ):
        if layer_type in layer_types and not _stated(config, size):
            return f"layer_types has {layer_type}, but {size} is {_stated(config, size)}"
    return None


def _what_does_not_fit(info: ModelInfo) -> str | None:
    """Return tokens and sizes beyond what there is: to make such a model could take all memory."""
    beyond = [token for token in info.eos_token_ids if not 0 <= token < info.vocab_size]
    if beyond:
        return f"eos_token_id is {beyond[0]}, but vocab_size is {info.vocab_size}"
    if info.max_model_len > _MOST_POSITIONS:
        return f"it has {info.max_model_len:,} positions: set model.max_model_len"
    num_stored = int(info.source.num_bytes(1))
    for one, other in (("vocab_size", "hidden_size"), ("num_hidden_layers", "hidden_size")):
        sizes = _stated(info.hf_config, one), _stated(info.hf_config, other)
        if all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] > num_stored:
            return (
                f"{one} is {sizes[0]} and {other} is {sizes[1]}, but its files hold {num_stored:,} "
                "numbers in all"
            )
    return None


def _layer_types(config: Any) -> list[str] | None:
    """Return the types of the layers, by name; None if the configuration states something else."""
    stated = _stated(config, "layer_types")
    if stated is None:
        return []
    is_good = isinstance(stated, list | tuple) and all(isinstance(kind, str) for kind in stated)
    return list(stated) if is_good else None


def _stated(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a field of layers, not of the whole; or one that is computed from others
        return None


def _name(config: Any) -> str:
    names = getattr(config, "architectures", None)
    return names[0] if names else type(config).__name__
