"""The configuration of a GGUF file: the facts that all architectures state, read one by one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aioserve.model_source import gguf_stacked as stacked
from aioserve.model_source.gguf_metadata import Metadata
from aioserve.model_source.gguf_rope import RopeTensors, read_rope

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
    """What a file states, and the fields of the configuration that come of it."""

    metadata: Metadata
    tensors: Mapping[str, tuple[int, ...]]  # shapes by name
    rope_tensors: RopeTensors
    fields: dict[str, Any] = field(default_factory=dict)

    def has(self, part: str) -> bool:
        """Whether some layer has a tensor of this name: `attn_q.bias`."""
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


def biases(**fields: str) -> Callable[[Facts], None]:
    """Sets each field to whether some layer has the tensor."""

    def more(facts: Facts) -> None:
        facts.fields |= {name: facts.has(part) for name, part in fields.items()}

    return more


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture, by llama.cpp's name, become a model of `transformers`."""

    model_type: str | Callable[[Facts], str]
    #: Keys, and the field for each: needed, but for those of which `fixed` has the field.
    keys: Mapping[str, str] = field(default_factory=lambda: RMS)
    #: Fields of which no key tells, and what an absent key means.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # keys without effect, besides those of all
    more: Callable[[Facts], None] = nothing
    #: Whether the size of a head may be stated, is always that of the model by their number, or is
    #: read by `more` on its own.
    heads: str = "stated"
    #: How many dimensions of a head turn: all, any number, or none.
    turned: str = "all"
    #: `layout(name, weights, fields)` is a tensor of the file as `transformers` stores it.
    layout: Callable[[str, Any, Mapping[str, Any]], Any] = lambda name, weights, fields: weights
    names: Mapping[str, str] = field(default_factory=dict)  # more names of tensors: ends, GGUF
    parts: stacked.Parts = stacked.experts  # tensors that hold parts of a parameter
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


def read_fields(architecture: Architecture, facts: Facts) -> dict[str, Any]:
    """All fields of the configuration. Raises `ConfigError` that names a key which is not served,
    or not read.
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
    architecture.more(facts)
    metadata.expect("attention.causal", lambda value: value is True, "True")
    metadata.refuse_unread()
    return {"model_type": model_type, **fields}


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
