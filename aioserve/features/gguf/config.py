"""What a GGUF file says of its model: metadata, rotary embedding, fields of the configuration.

A key that a model may have and that is not asked for would be left out in silence, and its answers
would be wrong: what is left in the end is refused by name. `Architecture` is how files of one
architecture are read; `architectures` has all of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aioserve.errors import ConfigError
from aioserve.features.gguf import layouts
from aioserve.model_source.stated_values import GGUF, check_stated

#: Keys of any architecture that change no token of a text: `vocab_size` repeats the rows of the
#: embedding, `pooling_type` is read with the file, `rope.dimension_sections` tells apart axes that
#: the positions of text have in common, the others say how the model came to be.
WITHOUT_EFFECT = (
    "vocab_size",
    "pooling_type",
    "rope.dimension_sections",
    "rope.scaling.finetuned",
    "tensor_data_layout",
)
#: Keys that change nothing where they are 0, as converters write them for models without the part.
_NONE_IF_ZERO = (
    "expert_count",
    "expert_used_count",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
    "nextn_predict_layers",
    "attention.sliding_window",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attention.shared_kv_layers",
    "leading_dense_block_count",
)


class Metadata:
    """The keys under the name of a file's architecture, without that name."""

    def __init__(self, path: Path, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._path = path
        prefix = f"{architecture}."
        self._values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self._asked: set[str] = set()
        check_stated(str(path), self._values, GGUF)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which thereby counts as read."""
        self._asked.add(key)
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        """Return the value of a key. Raises `ConfigError` if the file does not have it."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self._path} does not say {key}, which its architecture needs")
        return value

    def one(self, key: str, default: Any = None) -> Any:
        """Return the value of a key that may be stated for each layer, where all layers have the
        same. Raises `ConfigError` if they differ.
        """
        value = self.get(key, default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise self.refused(key, "layers that differ")
        return value[0]

    def each(self, key: str, num_layers: int) -> list[Any] | None:
        """Return the value of a key for each layer, where one value is that of all; None if it is
        not stated. Raises `ConfigError` for another number of values.
        """
        value = self.get(key)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers:
            raise self.refused(key, f"{len(values)} values for {num_layers} layers")
        return values

    def expect(self, key: str, is_served: Callable[[Any], bool], served: str) -> None:
        """Raises `ConfigError` unless the key is absent or its value is served."""
        value = self.one(key)
        if value is not None and not is_served(value):
            raise self.refused(key, f"{value!r:.99} where {served} is served")

    def refused(self, key: str, why: str) -> ConfigError:
        """Return the error of a key whose value is not served."""
        return ConfigError(f"{self._path}: {key} has {why}")

    def refuse_unread(self) -> None:
        """Raises `ConfigError` that names the keys which were not asked for and may have effect."""
        unread = [
            key if key.isprintable() else repr(key)
            for key, value in self._values.items()
            if key not in self._asked
            and key not in WITHOUT_EFFECT
            and not (key in _NONE_IF_ZERO and not value)
        ]
        if unread:
            raise ConfigError(
                f"{self._path}: aioserve does not read its {', '.join(sorted(unread)):.499}, "
                "without which the answers may be another model's"
            )


# Rotary embeddings of a GGUF file, as parameters of `transformers`.


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
    """The tensors of a file's rotary embedding."""

    divisors: Sequence[float] | None = None  # of the frequencies, at all lengths
    long: Sequence[float] | None = None  # of the frequencies, beyond the original length
    short: Sequence[float] | None = None  # of the frequencies, up to the original length


def read_rope(metadata: Metadata, tensors: RopeTensors, num_turned: int) -> dict[str, Any]:
    """Return the `rope_parameters` of the layers with full attention, whose heads turn `num_turned`
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
    """Return the low and high factor and the original length that the divisors may come from.
    Between the two bounds 1/divisor is linear in 1/wave: two such frequencies say what the bounds
    are, one says it for the factors that all published models have.
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
    """Return the divisor of the frequency with this wavelength."""
    if wave < original / high:
        return 1.0
    if wave > original / low:
        return factor
    smooth = (original / wave - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


# The configuration of a GGUF file: the facts that all architectures state, read one by one.


_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
#: Keys that nearly all architectures have, and the field for each.
_USUAL = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": _HEADS,
}
#: The same without the width of dense layers, where there are none or it is read on its own.
USUAL_WITHOUT_WIDTH = {key: name for key, name in _USUAL.items() if name != "intermediate_size"}
LAYER_NORM, RMS_KEY = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
RMS = {RMS_KEY: "rms_norm_eps"}


@dataclass
class Facts:
    """The facts that a file states, and the fields of the configuration that come of them."""

    metadata: Metadata
    tensors: Mapping[str, tuple[int, ...]]  # shapes by name
    rope_tensors: RopeTensors
    fields: dict[str, Any] = field(default_factory=dict)

    def has(self, part: str) -> bool:
        """Return whether some layer has a tensor of this name: `attn_q.bias`."""
        return any(name.endswith(f".{part}") for name in self.tensors)

    @property
    def num_layers(self) -> int:
        """Layers of the model; of more than one prediction, those of the first."""
        return int(self.fields["num_hidden_layers"])

    def windows(self, period: int, default: int | None = None) -> None:
        """Set `sliding_window` and `layer_types`: the last layer of each period sees everything."""
        window = self.metadata.get("attention.sliding_window", default)
        pattern = self.metadata.get("attention.sliding_window_pattern", period)
        layers = range(self.num_layers)
        if not isinstance(pattern, list):
            pattern = [pattern == 0 or (layer + 1) % pattern != 0 for layer in layers]
        if len(pattern) != self.num_layers:
            raise self.metadata.refused(
                "attention.sliding_window_pattern",
                f"{len(pattern)} values for {self.num_layers} layers",
            )
        kinds = ["sliding_attention" if window and near else "full_attention" for near in pattern]
        self.fields |= {"sliding_window": window or None, "layer_types": kinds}

    def same_theta(self) -> None:
        """Raise `ConfigError` if layers with a window are to turn by another base than others."""
        theta = self.fields["rope_parameters"]["rope_theta"]
        self.metadata.expect("rope.freq_base_swa", lambda value: value == theta, str(theta))

    def rope_by_type(self, window_theta: float | None = None) -> None:
        """Set `rope_parameters` by type of layer: those with a window are not stretched, and turn
        by `rope.freq_base_swa`, else by `window_theta`, else as the others.
        """
        full = self.fields["rope_parameters"]
        default = full["rope_theta"] if window_theta is None else window_theta
        theta = self.metadata.get("rope.freq_base_swa", default)
        near = {"rope_type": "default", "rope_theta": theta}
        self.fields["rope_parameters"] = {"full_attention": full, "sliding_attention": near}


def nothing(facts: Facts) -> None:
    """An architecture whose table says everything."""


class Windows(NamedTuple):
    """Layers with a sliding window, between those that see everything: the last of each period."""

    period: int
    size: int | None = None  # where the file does not say it
    #: The base that they turn by where the file does not say it: `same` for that of the others,
    #: which it has to be; None for that of the others, which it may be.
    theta: float | str | None = "same"


@dataclass(frozen=True)
class Architecture:
    """The way in which files of one architecture, by llama.cpp's name, become a model of
    `transformers`.
    """

    model_type: str | Callable[[Facts], str]
    #: Keys, and the field for each: needed, but for those of which `fixed` has the field.
    keys: Mapping[str, str] = field(default_factory=lambda: RMS)
    #: Fields of which no key tells, and what an absent key means.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # keys without effect, besides those of all
    #: Fields that are whether some layer has a tensor, and the name of that: `attn_q.bias`.
    has: Mapping[str, str] = field(default_factory=dict)
    windows: Windows | None = None
    is_sigmoid: bool = False  # whether experts are chosen by a sigmoid, if the file says by what
    more: Callable[[Facts], None] = nothing
    #: Whether the size of a head may be stated, is always that of the model by their number, or is
    #: read by `more` on its own.
    heads: str = "stated"
    #: How many dimensions of a head turn: all, any number, or none.
    turned: str = "all"
    #: `layout(name, weights, fields)` is a tensor of the file as `transformers` stores it.
    layout: Callable[[str, Any, Mapping[str, Any]], Any] = lambda name, weights, fields: weights
    names: Mapping[str, str] = field(default_factory=dict)  # more names of tensors: ends, GGUF
    parts: layouts.Parts = layouts.expert_parts  # tensors that hold parts of a parameter
    #: Tensors that hold several parameters one behind another, and the name of each: its number is
    #: put in the place of {}.
    unstacked: Mapping[str, str] = field(default_factory=dict)
    #: Parameters of one number, by the ends of their names, and the keys with one for each layer.
    numbers: Mapping[str, str] = field(default_factory=dict)
    #: Whether the module of the experts is one that can stand in for quantized ones.
    packs_experts: bool = True
    #: The architecture whose tensors have the same names, where the package gguf knows no names.
    named_as: str = ""
    stem: str = ""  # what the package gguf calls the part of the model before its head
    usual: Mapping[str, str] = field(default_factory=lambda: _USUAL)


_MOST_LAYERS = 1 << 14
_SIGMOID = 2  # of `expert_gating_func`


def read_fields(architecture: Architecture, facts: Facts) -> dict[str, Any]:
    """Return all fields of the configuration. Raises `ConfigError` that names a key which is not
    served, or not read.
    """
    metadata, fields = facts.metadata, facts.fields
    fields |= architecture.fixed
    for key, name in architecture.usual.items():
        fields[name] = metadata.one(key)
        if fields[name] is None:
            fields[name] = metadata.need(key)
    metadata.expect(
        "block_count",
        lambda count: type(count) is int and 0 < count <= _MOST_LAYERS,
        f"a number from 1 to {_MOST_LAYERS}",
    )
    for key, name in architecture.keys.items():
        if (value := metadata.one(key)) is not None:
            fields[name] = value
        elif name not in fields:
            metadata.need(key)
    for key in architecture.ignored:
        metadata.get(key)
    kind = architecture.model_type
    model_type = kind if isinstance(kind, str) else kind(facts)
    if _HEADS in fields and architecture.heads != "own":
        _read_heads(architecture, facts)
    if architecture.turned != "none":
        _read_rope(architecture, facts)
    fields["tie_word_embeddings"] = "output.weight" not in facts.tensors
    fields |= {name: facts.has(part) for name, part in architecture.has.items()}
    if architecture.is_sigmoid:
        metadata.expect("expert_gating_func", lambda kind: kind == _SIGMOID, "2, a sigmoid,")
    if architecture.windows is not None:
        _read_windows(architecture.windows, facts)
    architecture.more(facts)
    metadata.expect("attention.causal", lambda value: value is True, "True")
    metadata.refuse_unread()
    return {"model_type": model_type, **fields}


def _read_windows(windows: Windows, facts: Facts) -> None:
    facts.windows(windows.period, windows.size)
    if isinstance(windows.theta, str):
        facts.same_theta()
    else:
        facts.rope_by_type(windows.theta)


def _read_heads(architecture: Architecture, facts: Facts) -> None:
    metadata, fields = facts.metadata, facts.fields
    heads = fields[_HEADS]
    if _KV_HEADS not in fields:
        fields[_KV_HEADS] = metadata.one("attention.head_count_kv", heads)
    derived = fields["hidden_size"] // heads
    size = metadata.one("attention.key_length", derived)
    facts.fields["head_dim"] = size
    if architecture.heads == "derived":
        metadata.expect("attention.key_length", lambda value: value == derived, str(derived))
    metadata.expect("attention.value_length", lambda value: value == size, str(size))


def _read_rope(architecture: Architecture, facts: Facts) -> None:
    metadata, size = facts.metadata, facts.fields["head_dim"]
    turned = metadata.one("rope.dimension_count", size)
    rope = read_rope(metadata, facts.rope_tensors, turned)
    if architecture.turned == "all":
        metadata.expect("rope.dimension_count", lambda value: value == size, str(size))
    else:
        if not 0 < turned <= size or int(size * (turned / size)) != turned:
            raise metadata.refused("rope.dimension_count", f"{turned} of {size} dimensions")
        rope["partial_rotary_factor"] = turned / size
    facts.fields["rope_parameters"] = rope
