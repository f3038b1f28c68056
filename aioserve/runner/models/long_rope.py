"""Rotary embeddings (RoPE) that a longer text changes: LongRoPE's factors are chosen at start.

`transformers` computes the angles of all rows of a pass by the longest of them, so that a reply
would depend on its neighbours, and keys in the cache on what was computed beside them. Here
`max_model_len` chooses once, as in vLLM.
"""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def check_rope(text_config: Any, max_model_len: int) -> None:
    """Raise `ConfigError` for rotary embeddings whose angles would depend on the longest request
    of a batch, and for an original length that is no number.
    """
    for rope in _parameters(text_config):
        if rope.get("rope_type") == "longrope":
            _original(text_config, rope)
        elif rope.get("rope_type") == "dynamic":
            limit = _original(text_config, rope)
            if max_model_len > limit:
                raise ConfigError(
                    f"dynamic rotary embeddings are served up to {limit} positions only: set "
                    f"max_model_len to at most {limit} (it is {max_model_len})"
                )


def has_long_factors(text_config: Any, max_model_len: int) -> bool:
    """Return whether requests may be longer than the model's original length: then all of them turn
    by the long factors of LongRoPE.
    """
    return any(
        rope.get("rope_type") == "longrope" and max_model_len > _original(text_config, rope)
        for rope in _parameters(text_config)
    )


def with_factors_chosen(text_config: Any, max_model_len: int) -> Any:
    """Return the configuration of layers that are yet to be made: a copy with the long factors in
    the place of the short ones, where `has_long_factors` says so.
    """
    if not has_long_factors(text_config, max_model_len):
        return text_config
    chosen = copy.deepcopy(text_config)
    for rope in _parameters(chosen):
        if rope.get("rope_type") == "longrope":
            rope["short_factor"] = rope["long_factor"]
    return chosen


def set_long_factors(module: "nn.Module", text_config: Any, max_model_len: int) -> None:
    """Where `has_long_factors` says so, give the rotary embeddings of a loaded `module` the long
    factors at every length.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not has_long_factors(text_config, max_model_len):
        return
    for part in module.modules():
        kinds: Any = getattr(part, "rope_type", None)
        of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in of_layers.items():
            if kind != "longrope":
                continue
            config = with_factors_chosen(part.config, max_model_len)
            found, _ = ROPE_INIT_FUNCTIONS["longrope"](config, layer_type=layer_type)
            prefix = "" if layer_type is None else f"{layer_type}_"
            for name in ("inv_freq", "original_inv_freq"):
                getattr(part, prefix + name).copy_(found)


def _parameters(text_config: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of all layers, or those of each type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if not isinstance(parameters, dict):
        raise ConfigError(f"rope_parameters must be an object, got {parameters!r:.99}")
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def _original(text_config: Any, rope: dict[str, Any]) -> int:
    """Return the length, in tokens, up to which a model was first trained."""
    limit = rope.get("original_max_position_embeddings") or getattr(
        text_config, "original_max_position_embeddings", text_config.max_position_embeddings
    )
    if type(limit) is not int:
        raise ConfigError(
            f"original_max_position_embeddings must be a whole number, got {limit!r:.99}"
        )
    return limit
