"""Layers with states, as `transformers` wrote them, on packed steps.

A piece's state is read and written through the cache interface that such modules call; slots and
packed rows are around it. Knows modules and slots; knows nothing about requests.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.runner.attention.backend import StatePieces
from aioserve.runner.attention.bridge import UnsupportedModelError
from aioserve.runner.served_model import LayerStates


class StateKey(NamedTuple):
    """The name of one state of a layer with states."""

    kind: str  # "conv" or "recurrent"
    number: int  # a layer may have several


class StateSpec(NamedTuple):
    """The shape of one state of one request."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one state slot."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class PieceStates:
    """The states that a module takes for its cache while it computes B pieces: `transformers`'
    calls.
    """

    def __init__(self, states: dict[StateKey, Tensor] | None = None) -> None:
        """`states` [B, ...]; None: the pieces begin their texts."""
        self.states = {} if states is None else states
        self.widths: dict[int, int] = {}  # of convolutions

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> Tensor | None:
        """[B, channels, width] of the last inputs."""
        return self.states.get(StateKey("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int = 0, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent states of the B pieces, [B, ...]; None at the beginning of their
        texts.
        """
        return self.states.get(StateKey("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """Never: what takes drafts back computes the states again."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int = 0,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Take in new inputs [B, channels, n]; returns the ones before and these."""
        key = StateKey("conv", state_idx)
        known = self.states.get(key)
        if known is None:
            width = conv_kernel_size or conv_states.shape[-1]
            whole = F.pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        else:
            width = known.shape[-1]
            parts = [known.transpose(1, 2), conv_states.transpose(1, 2)]
            whole = torch.cat(parts, dim=1).transpose(1, 2)  # in memory token by token, as new ones
        self.states[key] = whole[..., -width:]
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int = 0, state_idx: int = 0
    ) -> Tensor:
        """Replace the recurrent states of the B pieces by these, and return them."""
        self.states[StateKey("recurrent", state_idx)] = recurrent_states
        return recurrent_states

    # As MiniMax calls it.
    get_linear_cache = get_recurrent_state

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """Replace the recurrent states of the B pieces, under the name that MiniMax calls."""
        self.update_recurrent_state(state)


# Layers with states, as `transformers` wrote them, on packed steps. These are state-space layers,
# linear attention and short convolutions. They are called for pieces of one length, and find and
# leave their states in slots. Knows the calls by which such modules reach their cache; knows
# nothing about requests or blocks.


_CALLS = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}
#: Of a module, and what tells the recurrent states of its pieces: the forward pass it is to have.
OwnForward = Callable[[nn.Module, Callable[[], Tensor | None]], Callable[..., Any]]
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")


@dataclass(slots=True)
class _Layer:
    """A module of a model that keeps states between tokens, such as a recurrent layer."""

    module: nn.Module
    forward: Callable[..., Any]
    signature: inspect.Signature
    argument: str  # which takes the cache
    specs: dict[StateKey, StateSpec] = field(default_factory=dict)
    slots: dict[StateKey, Tensor] = field(default_factory=dict)  # [num_slots, ...]
    by_token: bool = False  # it goes on with a text by one token at a time
    outputs: tuple[bool, ...] = (True,)  # which of them have a row for each token
    held: "list[_Held]" = field(default_factory=list)  # of the pieces with drafts in this step
    now: PieceStates | None = None  # of the pieces that are computed

    def known(self) -> Tensor | None:
        """Return the recurrent states of the pieces that are computed, before them."""
        return None if self.now is None else self.now.get_recurrent_state()


class _Pieces(NamedTuple):
    tokens: Tensor  # [B, L]
    sources: Tensor | None
    slots: Tensor
    copies: Tensor  # [2, C]
    place: slice | None = None  # of sources and slots, if they are the same, one behind the other

    @classmethod
    def of(cls, piece: StatePieces) -> "_Pieces":
        """`piece`, whose arrays are NumPy's, with torch tensors that share their memory."""
        tokens, slots, copies = map(torch.from_numpy, (piece.tokens, piece.slots, piece.copies))
        sources, first, place = None, int(piece.slots[0]), None
        if piece.sources is not None:
            sources = torch.from_numpy(piece.sources)
            last = first + len(piece.slots) - 1
            if piece.sources is piece.slots and list(piece.slots) == list(range(first, last + 1)):
                place = slice(first, last + 1)
        return cls(tokens, sources, slots, copies, place)

    def by_token(self) -> "list[_Pieces]":
        """Return the same pieces, a token at a time, but for the beginnings of texts."""
        if self.sources is None:
            return [self]
        last = self.tokens.shape[1] - 1
        return [
            _Pieces(
                self.tokens[:, i : i + 1],
                self.slots if i else self.sources,
                self.slots,
                self.copies if i == last else self.copies[:, :0],
            )
            for i in range(last + 1)
        ]


class _Held(NamedTuple):
    """The states from which those behind pieces are computed again, without wrong drafts."""

    arguments: dict[str, Any]  # of the pieces' tokens, [1, B * L, ...]
    states: dict[StateKey, Tensor]  # [B, ...], before them
    slots: Tensor  # B

    @classmethod
    def of(cls, layer: _Layer, piece: StatePieces, arguments: dict[str, Any]) -> "_Held":
        """Make it of a `piece` whose states are not written yet."""
        tokens = torch.from_numpy(piece.tokens).reshape(1, -1)
        own = {name: _take(value, tokens) for name, value in arguments.items()}
        assert piece.sources is not None, "drafts come behind a text"
        sources, slots = map(torch.from_numpy, (piece.sources, piece.slots))
        return cls(own, {key: kept[sources] for key, kept in layer.slots.items()}, slots)

    def take_back(self, layer: _Layer, num_wrong: Mapping[int, int], length: int) -> None:
        """Write the states without the last tokens of some pieces, which have `length` tokens."""
        places: dict[int, list[int]] = {}  # by the number of tokens that are right
        for place, slot in enumerate(self.slots.tolist()):
            if wrong := num_wrong.get(slot, 0):
                places.setdefault(length - wrong, []).append(place)
        for count, own in places.items():
            states = PieceStates({key: state[own] for key, state in self.states.items()})
            tokens = torch.tensor(own)[:, None] * length + torch.arange(count)
            for part in torch.split(tokens, 1 if layer.by_token else count, dim=1):
                _call(layer, layer.forward, self.arguments, part, states)
            for key, slots in layer.slots.items():
                slots[self.slots[own]] = states.states[key].to(slots.dtype)


class StatefulLayers(LayerStates):
    """The layers with states of one model. Without `used`, they compute what they are given as one
    new text.
    """

    def __init__(self, module: nn.Module, own_forward: OwnForward) -> None:
        self._own_forward = own_forward
        self._layers: list[_Layer] = []
        self._modules: set[nn.Module] = set()
        self.num_slots = 0
        self._step: list[_Pieces] | None = None
        self._with_drafts: list[StatePieces] = []  # of the newest step
        self._step_by_token: list[_Pieces] = []
        self._is_probing = False
        self._proved: dict[type, tuple[bool, tuple[bool, ...]]] = {}
        for child in module.modules():
            if not _CALLS & _names(type(child)):
                continue
            signature = inspect.signature(child.forward)
            argument = next((a for a in _CACHE_ARGUMENTS if a in signature.parameters), None)
            if argument is not None:
                layer = _Layer(child, child.forward, signature, argument)
                layer.forward = own_forward(child, layer.known)
                self._layers.append(layer)
                self._modules.update(child.modules())
                child.forward = self._calling(layer)

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, module: nn.Module) -> bool:
        """Return whether it is one of these layers or in one."""
        return module in self._modules

    @property
    def bytes_per_slot(self) -> int:
        """The states of one request, in all layers; known after `probing`."""
        return sum(spec.num_bytes for layer in self._layers for spec in layer.specs.values())

    @property
    def tensors(self) -> list[Tensor]:
        """The states of all slots, [num_slots, ...], layer by layer; known after `allocate`."""
        return [slots for layer in self._layers for slots in layer.slots.values()]

    @contextmanager
    def probing(self) -> Iterator[None]:
        """See in a forward pass which states there are."""
        self._is_probing = True
        try:
            yield
        finally:
            self._is_probing = False

    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` states of each layer; memory is taken as they are written."""
        self.num_slots = num_slots
        for layer in self._layers:
            layer.slots = {
                key: torch.zeros((num_slots, *spec.shape), dtype=spec.dtype)
                for key, spec in layer.specs.items()
            }

    @contextmanager
    def used(self, pieces: Sequence[StatePieces]) -> Iterator[None]:
        """While a forward pass runs over these pieces."""
        self._step = [_Pieces.of(piece) for piece in pieces]
        self._with_drafts = [piece for piece in pieces if piece.has_drafts]
        if any(layer.by_token for layer in self._layers):
            self._step_by_token = [token for piece in self._step for token in piece.by_token()]
        try:
            yield
        finally:
            self._step = None

    def take_back(self, num_wrong: Mapping[int, int]) -> None:
        """Drafts at the ends of pieces of the newest step were wrong; `num_wrong` has their number
        by the slot of its states. The states become those of the tokens before.
        """
        for layer in self._layers:
            for held, piece in zip(layer.held, self._with_drafts, strict=True):
                held.take_back(layer, num_wrong, piece.tokens.shape[1])
            layer.held = []

    def close(self) -> None:
        """Give back the memory of the slots: the modules know each other, so they go later."""
        for layer in self._layers:
            layer.slots, layer.held = {}, []

    def _calling(self, layer: _Layer) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._step is not None:
                step = self._step_by_token if layer.by_token else self._step
                arguments = layer.signature.bind(*args, **kwargs).arguments
                layer.held = [_Held.of(layer, piece, arguments) for piece in self._with_drafts]
                return _run(layer, step, arguments)
            if self._is_probing:
                return self._probe(layer, args, kwargs)
            return layer.forward(*args, **kwargs)

        return forward

    def _probe(self, layer: _Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = layer.signature.bind(*args, **kwargs)
        states = PieceStates()
        bound.arguments[layer.argument] = states
        result = layer.forward(*bound.args, **bound.kwargs)
        layer.specs = {
            key: StateSpec(tuple(state.shape[1:]), state.dtype)
            for key, state in states.states.items()
        }
        kind = type(layer.module)
        if kind not in self._proved:
            self._proved[kind] = _prove(layer, bound.arguments, self._own_forward)
        layer.by_token, layer.outputs = self._proved[kind]
        return result


def _run(layer: _Layer, step: list[_Pieces], arguments: dict[str, Any]) -> Any:
    """Return the outputs of all pieces, as the module gives them for one text."""
    num_tokens = next(iter(arguments.values())).shape[1]
    outs: list[Tensor | None] = [None for _ in layer.outputs]
    for pieces in step:
        known = None
        if pieces.sources is not None:  # by a slice, where they lie: nothing is copied
            source = pieces.sources if pieces.place is None else pieces.place
            known = {key: slots[source] for key, slots in layer.slots.items()}
        states = PieceStates(known)
        found = _call(layer, layer.forward, arguments, pieces.tokens, states)
        for key, slots in layer.slots.items():
            state = states.states[key]
            if pieces.place is None:
                slots[pieces.slots] = state.to(slots.dtype)
            elif state.data_ptr() != slots[pieces.place].data_ptr():  # else changed in its place
                slots[pieces.place] = state
            if pieces.copies.shape[1]:
                places, copies = pieces.copies
                slots[copies] = slots[pieces.slots[places]]
        for i, (piece, has_rows) in enumerate(zip(found, layer.outputs, strict=True)):
            if not has_rows:
                continue
            out = outs[i]
            if out is None:
                out = outs[i] = piece.new_empty(1, num_tokens, *piece.shape[2:])
            out[0, pieces.tokens] = piece
    return outs[0] if len(outs) == 1 else tuple(outs)


def _call(
    layer: _Layer,
    forward: Callable[..., Any],
    arguments: dict[str, Any],
    tokens: Tensor,
    states: PieceStates,
) -> tuple[Any, ...]:
    """Return the outputs of a module for pieces; `arguments` [1, T, ...] are those of all
    tokens.
    """
    own = {name: _take(value, tokens) for name, value in arguments.items()}
    own[layer.argument] = layer.now = states
    try:
        found = forward(**_spread(layer.signature, own))
    finally:
        layer.now = None
    return found if isinstance(found, tuple) else (found,)


def _prove(
    layer: _Layer, arguments: dict[str, Any], own_forward: OwnForward
) -> tuple[bool, tuple[bool, ...]]:
    """Return whether the module goes on with a text by one token at a time, because it forgets its
    states where it is given more; and which of its outputs have rows. By its own code for the whole
    text, and with our steps for its parts; in float32, so that what it forgets is not taken for
    rounding. Raises `UnsupportedModelError` if it cannot go on.
    """
    copied = copy.deepcopy(layer.module).float()
    del copied.forward  # the class's own
    with_steps = own_forward(copied, layer.known)
    exact = {name: _as_float(value) for name, value in arguments.items()}
    tokens = torch.arange(next(iter(arguments.values())).shape[1])[None]
    half = tokens.shape[1] // 2

    def run(forward: Callable[..., Any], *parts: Tensor) -> list[tuple[Any, ...]]:
        states = PieceStates()
        return [_call(layer, forward, exact, part, states) for part in parts]

    (whole,) = run(copied.forward, tokens)
    first, second = run(with_steps, tokens[:, :half], tokens[:, half:])
    one_by_one = tokens[:, half:].unbind(1)
    single = run(with_steps, tokens[:, :half], *(token[:, None] for token in one_by_one))
    rows = tuple(
        all(
            isinstance(out, Tensor) and out.dim() > 1 and out.shape[1] == n
            for out, n in ((a, tokens.shape[1]), (b, half))
        )
        for a, b in zip(whole, first, strict=True)
    )

    def is_whole(parts: list[tuple[Any, ...]]) -> bool:
        return all(
            torch.allclose(
                torch.cat([part[i] for part in parts], 1),
                out,
                rtol=1e-3,
                atol=1e-3 * float(out.std()),
            )
            for i, out in enumerate(whole)
            if rows[i]
        )

    if is_whole(single):
        return not is_whole([first, second]), rows
    raise UnsupportedModelError(
        f"its {type(layer.module).__name__} does not go on with a text that it began"
    )


def _as_float(value: Any) -> Any:
    """`value`, a tensor or nested tuples of them, with floating-point tensors in float32."""
    if isinstance(value, tuple):
        return tuple(map(_as_float, value))
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _take(value: Any, tokens: Tensor) -> Any:
    """Return the part of an argument [1, T, ...], or of several, that belongs to `tokens` [B,
    L].
    """
    if isinstance(value, tuple):
        return tuple(_take(one, tokens) for one in value)
    return value[0][tokens] if isinstance(value, Tensor) and value.dim() > 1 else value


def _spread(signature: inspect.Signature, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with those that a `**kwargs` caught among the others."""
    spread: dict[str, Any] = {}
    for name, value in arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            spread |= value
        else:
            spread[name] = value
    return spread


def _names(cls: type) -> set[str]:
    """Return the names of attributes that the methods of a class reach."""
    names: set[str] = set()
    for function in vars(cls).values():
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is not None:
            names.update(code.co_names)
    return names
