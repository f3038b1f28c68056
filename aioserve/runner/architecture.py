"""Which architectures paged attention can serve, decided from the configuration alone.

Reads `transformers` configurations; touches no weights.
"""

import sys
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
# Where the model's code keeps what such layers remember in the cache that it is given.
_STATE_LAYER_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_STATE_CALLS = ("update_conv_state", "update_recurrent_state", "set_linear_cache")
_OTHER_LAYER_TYPES = {"moe", "mlp"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_architecture(info: ModelInfo) -> None:
    """Raise `ConfigError` that names an architecture which cannot be served, and why."""
    reason = _why_unsupported(info.whole_config, info.hf_config, has_states(info))
    if reason is not None:
        raise ConfigError(f"unsupported architecture {_name(info.whole_config)}: {reason}")
    _check_rope(info.hf_config, info.max_model_len)


def has_states(info: ModelInfo) -> bool:
    """Whether layers of the model remember a text in a fixed size, as far as its code says."""
    config = info.whole_config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    assert module.__file__ is not None
    code = Path(module.__file__).read_text(encoding="utf-8")
    return any(f".{call}(" in code for call in _STATE_CALLS)


def _why_unsupported(config: Any, text_config: Any, has_states: bool) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models are not served"
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if getattr(model_class, "_is_stateful", False) and not has_states:
            return "its layers keep states in a way of their own, which is not served"
    elif not hasattr(config, "auto_map"):
        return "it is not a causal language model of transformers"
    other = set(getattr(text_config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if has_states:
        other -= _STATE_LAYER_TYPES | _OTHER_LAYER_TYPES
    if other:
        return f"layers of type {', '.join(sorted(other))} are not served"
    return None


def _check_rope(text_config: Any, max_model_len: int) -> None:
    """Refuse rotary angles that depend on the longest request of the batch.

    Beyond its original length, such a model changes the angles of all rows of a forward pass at
    once: a reply would depend on its neighbours.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") not in _BATCH_DEPENDENT_ROPE:
            continue
        limit = rope.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", text_config.max_position_embeddings
        )
        if max_model_len > limit:
            raise ConfigError(
                f"{rope['rope_type']} rotary embeddings are served up to {limit} positions only: "
                f"set max_model_len to at most {limit} (it is {max_model_len})"
            )


def _name(config: Any) -> str:
    names = getattr(config, "architectures", None)
    return names[0] if names else type(config).__name__
