"""Weights in few bits: what a parameter of a module stands in for, and how its numbers are had.

A weight is bytes in blocks of a format, which says how to read them as codes and scales; which
formats there are is known elsewhere. A parameter that stands in for such a weight takes no memory:
code that multiplies asks what is `attached` to it. Knows modules; knows no files and no kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Codes(NamedTuple):
    """A weight [out, in] as small numbers: `scale * code + offset`, G groups of inputs per output.

    `values` are signed bytes [out, in], those of 4 bits from 0 to 15. `scales` and `offsets` are
    float16 [out, G]; or signed bytes, times float16 `supers` and `super_offsets` [out, G / n], of
    which each serves n groups. Without `offsets` they are `-zero * scale`.
    """

    bits: int
    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    supers: Tensor | None = None
    super_offsets: Tensor | None = None
    zero: int = 0

    def dequantize(self) -> Tensor:
        """Return the weight in float32: as the package gguf computes it, to the bit."""
        scales = _times(self.scales, self.supers)
        grouped = self.values.view(*scales.shape, -1)
        weight = grouped * scales[..., None]
        if self.offsets is not None:
            weight += _times(self.offsets, self.super_offsets)[..., None]
        elif self.zero:
            weight = (grouped - self.zero) * scales[..., None]
        return weight.view(self.values.shape)


_PIECE = 1 << 15  # weights: few enough that torch calls no second thread, which would cost more


def _times(numbers: Tensor, supers: Tensor | None) -> Tensor:
    if supers is None:
        return numbers.float()
    return (numbers.view(*supers.shape, -1) * supers.float()[..., None]).flatten(1)


class Format(NamedTuple):
    """The layout of a type of weights, in blocks of some inputs of an output."""

    inputs: int
    num_bytes: int
    decode: Callable[[Tensor], Codes]  # of uint8 [out, blocks, num_bytes]


class QuantizedWeight:
    """A weight [out, in] in a format, as its bytes."""

    def __init__(self, kind: str, data: Tensor, blocks: Format) -> None:
        """`data`: uint8 [out, bytes of a row], in `blocks` of the format named `kind`."""
        self.kind, self.data, self.format = kind, data, blocks
        per_block, block_bytes, _ = blocks
        self.shape = (data.shape[0], data.shape[1] // block_bytes * per_block)

    @property
    def num_elements(self) -> int:
        return self.shape[0] * self.shape[1]

    def codes(self) -> Codes:
        per_block, block_bytes, decode = self.format
        return decode(self.data.view(self.shape[0], self.shape[1] // per_block, block_bytes))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return all of it, a few rows at a time."""
        out = torch.empty(self.shape, dtype=dtype)
        step = max(1, _PIECE // self.shape[1])
        for start in range(0, self.shape[0], step):
            out[start : start + step] = self.rows(slice(start, start + step)).codes().dequantize()
        return out

    def rows(self, index: Tensor | slice) -> "QuantizedWeight":
        return QuantizedWeight(self.kind, self.data[index], self.format)


_PIECE = 1 << 15  # weights: few enough that torch calls no second thread, which would cost more


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a weight [out, in] that takes no memory, for a parameter that has one `attached`: all
    of its rows are the same numbers, so that a model goes through, to no purpose.
    """
    return torch.linspace(-1, 1, shape[1]).mul_(shape[1] ** -0.5).to(dtype).expand(shape)


def attach(parameter: Tensor, weight: QuantizedWeight) -> None:
    """Note what a parameter stands in for."""
    parameter.quantized_weight = weight  # type: ignore[attr-defined]


def attached(parameter: Tensor) -> QuantizedWeight | None:
    """Return what a parameter stands in for, if for anything."""
    return getattr(parameter, "quantized_weight", None)


class StoredExperts(NamedTuple):
    """The weights [out, in] of all experts of a layer, of which a parameter has none."""

    weights: list[QuantizedWeight]
    is_transposed: bool  # whether the parameter is [experts, in, out]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers that stand in for each expert: kernels of torch want one with
        strides.
        """
        return stand_in(self.weights[0].shape, dtype).contiguous()

    def stand_in(self, matrix: Tensor) -> nn.Parameter:
        """Return a parameter of which all experts are the same `matrix`, which other layers may
        share.
        """
        whole = matrix.expand(len(self.weights), *matrix.shape)
        parameter = nn.Parameter(whole.transpose(1, 2) if self.is_transposed else whole, False)
        parameter.stored_experts = self  # type: ignore[attr-defined]
        parameter.quantized_experts = self.weights  # type: ignore[attr-defined]
        return parameter

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return all numbers, as the parameter has them."""
        whole = torch.stack([weight.dequantize(dtype) for weight in self.weights])
        return whole.transpose(1, 2).contiguous() if self.is_transposed else whole


def stored_experts(parameter: Tensor) -> StoredExperts | None:
    """Return the experts that a parameter stands in for, if it does."""
    return getattr(parameter, "stored_experts", None)


def stands_in(parameter: Tensor) -> bool:
    """Return whether a parameter has no numbers, but something that is quantized has."""
    return attached(parameter) is not None or stored_experts(parameter) is not None


def unpacked(parameter: Tensor) -> Tensor:
    """Return the numbers of a parameter, or of what it stands in for."""
    weight = attached(parameter) or stored_experts(parameter)
    return parameter.data if weight is None else weight.dequantize(parameter.dtype)


def _standing_in(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of this module, without its parts, that have no numbers."""
    own = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if stands_in(parameter)}


@contextmanager
def unpacked_in_turn(module: nn.Module) -> Iterator[None]:
    """Meanwhile `module` computes with what its parameters stand in for, unpacked one by one."""

    def unpack(part: nn.Module, _: Any) -> None:
        standing_in[part] = _standing_in(part)
        for name, parameter in standing_in[part].items():
            setattr(part, name, nn.Parameter(unpacked(parameter), requires_grad=False))

    def forget(part: nn.Module, _: Any, __: Any) -> None:
        for name, parameter in standing_in.pop(part).items():
            setattr(part, name, parameter)

    standing_in: dict[nn.Module, dict[str, nn.Parameter]] = {}
    handles: list[Any] = []
    for part in filter(_standing_in, module.modules()):
        handles += (
            part.register_forward_pre_hook(unpack),
            part.register_forward_hook(forget, always_call=True),
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unpack_all(module: nn.Module) -> None:
    """Give all parameters of `module` the numbers of what they stand in for."""
    whole: dict[Tensor, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in _standing_in(part).items():
            if parameter not in whole:  # a tied one stays one
                whole[parameter] = nn.Parameter(unpacked(parameter), requires_grad=False)
            setattr(part, name, whole[parameter])


def weights_of_experts(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights [experts, ...] of a layer's experts, first and second
    product, where `module` has them as `transformers` has most; else none.
    """
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    found = (getattr(module, name, None) for name in names)
    return names if all(isinstance(one, Tensor) and one.dim() == 3 for one in found) else ()


def has_quantized_layers(module: Any) -> bool:
    """Return whether anything but embedding and head of a causal language model is quantized."""
    outer = (module.get_input_embeddings(), module.get_output_embeddings())
    shared = {id(part.weight) for part in outer if part is not None}
    return any(
        id(p) not in shared and (attached(p) or quantized_experts(p)) for p in module.parameters()
    )


def told_of_weights(module: nn.Module) -> tuple[str, int]:
    """Return the formats of all quantized weights of `module`, in words, and their bytes."""
    stored: dict[int, QuantizedWeight] = {}  # one for what is tied
    for parameter in module.parameters():
        own = [attached(parameter), *(quantized_experts(parameter) or ())]
        stored |= {id(weight): weight for weight in own if weight is not None}
    kinds = sorted({weight.kind for weight in stored.values()})
    return ", ".join(kinds), sum(weight.data.numel() for weight in stored.values())


def quantized_experts(parameter: Tensor) -> list[QuantizedWeight] | None:
    """Return the weights [out, in] of each expert in few bits, if they were rounded to these."""
    return getattr(parameter, "quantized_experts", None)
