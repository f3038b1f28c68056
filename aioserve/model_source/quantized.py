"""Weights of a few bits in the formats of GGUF: as bytes, as codes and scales, and as numbers.

What `--quantization` makes of weights are the same formats. Knows bytes and arithmetic; knows
nothing about files, nor about who multiplies with them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


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
        """The weight in float32: as the package gguf computes it, to the bit."""
        scales = _times(self.scales, self.supers)
        grouped = self.values.view(*scales.shape, -1)
        weight = grouped * scales[..., None]
        if self.offsets is not None:
            weight += _times(self.offsets, self.super_offsets)[..., None]
        elif self.zero:
            weight = (grouped - self.zero) * scales[..., None]
        return weight.view(self.values.shape)


class QuantizedWeight:
    """A weight [out, in] in a format of `FORMATS`, as its bytes."""

    def __init__(self, kind: str, data: Tensor) -> None:
        """`data`: uint8 [out, bytes of a row]."""
        self.kind, self.data = kind, data
        per_block, block_bytes, _ = FORMATS[kind]
        self.shape = (data.shape[0], data.shape[1] // block_bytes * per_block)

    @property
    def num_elements(self) -> int:
        return self.shape[0] * self.shape[1]

    def codes(self) -> Codes:
        per_block, block_bytes, decode = FORMATS[self.kind]
        return decode(self.data.view(self.shape[0], self.shape[1] // per_block, block_bytes))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All of it, a few rows at a time."""
        out = torch.empty(self.shape, dtype=dtype)
        step = max(1, _PIECE // self.shape[1])
        for start in range(0, self.shape[0], step):
            out[start : start + step] = self.rows(slice(start, start + step)).codes().dequantize()
        return out

    def rows(self, index: Tensor | slice) -> "QuantizedWeight":
        return QuantizedWeight(self.kind, self.data[index])


_PIECE = 1 << 14  # weights: few enough that torch calls no second thread, which would cost more


def attach(parameter: Tensor, weight: QuantizedWeight) -> None:
    """Fill a parameter with what `weight` is in its type, and note where that came from."""
    parameter.data.copy_(weight.dequantize(parameter.dtype))
    parameter._quantized = weight  # type: ignore[attr-defined]


def attached(parameter: Tensor) -> QuantizedWeight | None:
    """What the numbers of a parameter were unpacked from, if from anything."""
    return getattr(parameter, "_quantized", None)


def _times(numbers: Tensor, supers: Tensor | None) -> Tensor:
    if supers is None:
        return numbers.float()
    return (numbers.view(*supers.shape, -1) * supers.float()[..., None]).flatten(1)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at a byte of every block [out, blocks, bytes]: [out, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(data: Tensor) -> Tensor:
    """The low halves of the last dimension's bytes, then the high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: Tensor, places: list[int], mask: int) -> Tensor:
    """[..., n] bytes to [..., len(places), n]: what lies from each of these bits on."""
    shifts = torch.tensor(places, dtype=torch.uint8)[:, None]
    return (data[..., None, :] >> shifts) & mask


def _rows(values: Tensor) -> Tensor:
    return values.flatten(1).view(torch.int8)


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(8, _rows(blocks[..., 2:].contiguous()), _halves(blocks, 0))


def _q4_0(blocks: Tensor) -> Codes:
    return Codes(4, _rows(_nibbles(blocks[..., 2:])), _halves(blocks, 0), zero=8)


def _q4_1(blocks: Tensor) -> Codes:
    return Codes(4, _rows(_nibbles(blocks[..., 4:])), _halves(blocks, 0), _halves(blocks, 2))


def _fifth_bits(data: Tensor) -> Tensor:
    """[..., 4] bytes, a bit per number, as [..., 32] times 16."""
    bits = _bits(data, list(range(8)), 1).transpose(-1, -2)
    return bits.flatten(-2) << 4


def _q5_0(blocks: Tensor) -> Codes:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Codes(8, _rows(values) - 16, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Codes(8, _rows(values), _halves(blocks, 0), _halves(blocks, 2))


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """8 of each, of 6 bits, in 12 bytes after two float16 numbers: [out, 8 * blocks]."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    offsets = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    return _rows(scales), _rows(offsets)


def _with_offsets(bits: int, values: Tensor, blocks: Tensor) -> Codes:
    scales, offsets = _scales_and_offsets(blocks)
    return Codes(bits, _rows(values), scales, offsets, _halves(blocks, 0), -_halves(blocks, 2))


def _q4_k(blocks: Tensor) -> Codes:
    values = _bits(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32), [0, 4], 15)
    return _with_offsets(4, values.flatten(2), blocks)


def _q5_k(blocks: Tensor) -> Codes:
    low = _bits(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32), [0, 4], 15).flatten(-3, -2)
    return _with_offsets(
        8, (low | _bits(blocks[..., 16:48], list(range(8)), 1) << 4).flatten(2), blocks
    )


def _q6_k(blocks: Tensor) -> Codes:
    low = _bits(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64), [0, 4], 15).flatten(-2)
    high = _bits(blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32), [0, 2, 4, 6], 3).flatten(
        -2
    )
    values = _rows((low | high << 4).flatten(2)) - 32
    return Codes(8, values, _rows(blocks[..., 192:208].contiguous()), supers=_halves(blocks, 208))


class Format(NamedTuple):
    """How a type of GGUF lies in blocks of some inputs of an output."""

    inputs: int
    num_bytes: int
    decode: Callable[[Tensor], Codes]  # of uint8 [out, blocks, num_bytes]


FORMATS = {
    "Q4_0": Format(32, 18, _q4_0),
    "Q4_1": Format(32, 20, _q4_1),
    "Q5_0": Format(32, 22, _q5_0),
    "Q5_1": Format(32, 24, _q5_1),
    "Q8_0": Format(32, 34, _q8_0),
    "Q4_K": Format(256, 144, _q4_k),
    "Q5_K": Format(256, 176, _q5_k),
    "Q6_K": Format(256, 210, _q6_k),
}


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """The nearest weight [out, in] in "Q8_0" or "Q4_0"; `in` is a multiple of 32."""
    blocks = weight.float().view(weight.shape[0], -1, 32)
    if kind == "Q8_0":
        scale = blocks.abs().amax(-1, keepdim=True) / 127
    else:  # 4 bits count from -8 to 7: the largest number becomes -8, whatever its sign
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = largest / -8
    scale = scale.to(torch.float16)
    values = torch.where(scale == 0, 0, blocks / scale.float()).round()
    if kind == "Q8_0":
        data = values.clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        low, high = (values.clamp(-8, 7) + 8).to(torch.uint8).chunk(2, dim=-1)
        data = low | high << 4
    return QuantizedWeight(kind, torch.cat((scale.view(torch.uint8), data), dim=-1).flatten(1))
