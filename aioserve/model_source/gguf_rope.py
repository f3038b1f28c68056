"""Rotary embeddings of a GGUF file, as parameters of `transformers`."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from aioserve.model_source.gguf_metadata import Metadata

#: Names of the tensors from which rotary parameters are read.
DIVISORS, LONG, SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
#: Parameters of YaRN, after `rope.scaling.yarn_`, by the names of `transformers`.
_YARN = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
#: Keys without effect where nothing is stretched by YaRN or LongRoPE.
OF_STRETCHES = (
    *(f"rope.scaling.yarn_{key}" for key in _YARN),
    "rope.scaling.original_context_length",
)
_CLOSE = 1e-5  # relative: the file has float32
_KINDS = ("none", "linear", "yarn", "longrope")


class RopeTensors(NamedTuple):
    """What a file has in the tensors of its rotary embedding."""

    divisors: Sequence[float] | None = None  # of the frequencies, at all lengths
    long: Sequence[float] | None = None  # of the frequencies, beyond the original length
    short: Sequence[float] | None = None  # of the frequencies, up to the original length


def read_rope(metadata: Metadata, tensors: RopeTensors, num_turned: int) -> dict[str, Any]:
    """The `rope_parameters` of the layers with full attention, whose heads turn `num_turned`
    dimensions. Raises `ConfigError` for a scaling that is not served.
    """
    length = metadata.need("context_length")
    rope = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base", 10000.0)}
    kind = metadata.get("rope.scaling.type", "linear")
    if kind not in _KINDS:
        raise metadata.refused("rope.scaling.type", f"{kind!r:.99}; served are {', '.join(_KINDS)}")
    factor = metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1.0
    original = metadata.get("rope.scaling.original_context_length", length)
    amplitude = metadata.get("rope.scaling.attn_factor")
    yarn = {
        field: value
        for key, field in _YARN.items()
        if (value := metadata.get(f"rope.scaling.yarn_{key}")) is not None
    }
    metadata.expect("rope.scaling.yarn_ext_factor", lambda value: value in (-1, 1), "1")
    if all_dims := metadata.get("rope.scaling.yarn_log_multiplier"):
        if kind != "yarn" or amplitude is not None or "attention_factor" in yarn:
            raise metadata.refused("rope.scaling.yarn_log_multiplier", "no place among the others")
        yarn |= {"mscale": 1.0, "mscale_all_dim": all_dims}
    if (tensors.long or tensors.divisors) and kind != "none" and factor != 1:
        raise metadata.refused("rope.scaling.factor", f"{factor!r:.99} beside tensors of factors")
    if tensors.long is not None and tensors.short is not None:
        return rope | {
            "rope_type": "longrope",
            "factor": length / original,
            "long_factor": list(tensors.long),
            "short_factor": list(tensors.short),
            "original_max_position_embeddings": original,
            "attention_factor": 1.0 if amplitude is None else amplitude,
        }
    if kind == "yarn" and factor != 1:
        if amplitude not in (None, 1) and "attention_factor" in yarn:
            raise metadata.refused("rope.scaling.attn_factor", "a factor beside yarn_attn_factor")
        if amplitude is not None:
            yarn.setdefault("attention_factor", amplitude * (0.1 * math.log(factor) + 1))
        return rope | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **yarn,
        }
    metadata.expect("rope.scaling.attn_factor", lambda value: value == 1, "1 without YaRN")
    if tensors.divisors is not None:
        return _divided(rope, tensors.divisors, num_turned, length)
    if kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    return rope


def _divided(
    rope: dict[str, Any], divisors: Sequence[float], num_turned: int, length: int
) -> dict[str, Any]:
    """Frequencies divided as the file says: by the settings of Llama 3 that give these divisors,
    if there are some, else one by one.
    """
    theta = rope["rope_theta"]
    waves = [2 * math.pi * theta ** (2 * i / num_turned) for i in range(len(divisors))]
    factor = max(divisors)
    if factor == 1:
        return rope
    for low, high, original in _settings(waves, divisors, factor):
        found = [_llama3(wave, factor, low, high, original) for wave in waves]
        if all(math.isclose(a, b, rel_tol=_CLOSE) for a, b in zip(found, divisors, strict=True)):
            return rope | {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return rope | {  # the same divisors up to the length of the model: it has no other regime
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "long_factor": list(divisors),
        "short_factor": list(divisors),
        "original_max_position_embeddings": length,
    }


def _settings(
    waves: Sequence[float], divisors: Sequence[float], factor: float
) -> list[tuple[float, float, int]]:
    """The low and high factor and the original length that the divisors may come from. Between the
    two bounds 1/divisor is linear in 1/wave: two such frequencies say what the bounds are, one says
    it for the factors that all published models have.
    """
    between = [
        (1 / wave, (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for wave, divisor in zip(waves, divisors, strict=True)
        if 1 + _CLOSE < divisor < factor * (1 - _CLOSE)
    ]
    found: list[tuple[float, float, int]] = [(1.0, 4.0, 8192)]
    if between:
        inverse, smooth = between[0]
        found.append((1.0, 4.0, round((3 * smooth + 1) / inverse)))
    if len(between) > 1 and (slope := _slope(between[0], between[-1])) > 0:
        offset = slope * between[0][0] - between[0][1]  # low / (high - low)
        if offset > 0:
            found.append((1.0, 1 / offset + 1, round(slope / offset)))
    return found


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0]) if b[0] != a[0] else 0.0


def _llama3(wave: float, factor: float, low: float, high: float, original: int) -> float:
    """The divisor of the frequency with this wavelength."""
    if wave < original / high:
        return 1.0
    if wave > original / low:
        return factor
    smooth = (original / wave - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
