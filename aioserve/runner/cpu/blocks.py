"""Matrix products by our own kernels with quantized weights, which stay that small in memory.

Knows how the kernels want them; knows nothing about files, formats or models.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels import Kernels
from aioserve.kernels.structs import BlockPart, PackedWeight
from aioserve.model_source.quantized import Codes, QuantizedWeight
from aioserve.runner.cpu.logits_memory import LogitsMemory

_PIECE = 1 << 15  # weights packed at a time: few enough that torch calls no second thread
_SIGN = 128  # added to codes of 8 bits with a sign
_Field = tuple[str, np.dtype[Any], tuple[int, ...]]


class PartState(msgspec.Struct, frozen=True):
    """One of the weights of a `BlockLinear`: its panels, and what `block_part` in C tells of them.

    `panels` [P, bytes of a panel] are uint8.
    """

    panels: Tensor
    outputs: int
    bits: int
    group: int
    per_super: int
    has_offset: bool
    zero: int


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    """Weights in the layout of the kernel, and their bias: what a `BlockLinear` is made of."""

    parts: list[PartState]
    bias: Tensor | None  # and behind it as many numbers as a panel has outputs
    inputs: int
    dtype: torch.dtype  # of the rows that are multiplied
    out_dtype: torch.dtype
    is_int8: bool = False  # whether rows are quantized


class BlockLinear:
    """x @ weight.T + bias for weights [out_i, in] one below the other, each in its own format.

    In float32 the results are those of the weights in float32. Of two-byte types, inputs become
    whole numbers of 16 bits that share a scale among 32, but those of bfloat16 stay as they are
    where its pairs are multiplied fast; and the weights are exact. Or, from
    `Kernels.rounded_from` rows of bfloat16 on, inputs stay and weights become bfloat16.

    After `quantize_rows`, inputs of every type become whole numbers of 8 bits, 32 with one scale;
    the weights are exact.
    """

    def __init__(self, kernels: Kernels, blocks: Blocks) -> None:
        self.kernels, self.state = kernels, blocks
        self._parts = (BlockPart * len(blocks.parts))(*map(_block_part, blocks.parts))
        self.packed = PackedWeight(
            None,
            None if blocks.bias is None else blocks.bias.data_ptr(),
            blocks.inputs,
            sum(part.outputs for part in blocks.parts),
            self._parts,
            len(self._parts),
            blocks.out_dtype is not blocks.dtype,
            blocks.is_int8,
        )
        self._logits_memory = LogitsMemory() if self.packed.is_wide else None

    @classmethod
    def of(
        cls,
        kernels: Kernels,
        weights: Sequence[QuantizedWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> "BlockLinear":
        """Lay out `weights`. Rows are of `dtype`, outputs of `out_dtype`: the same (None), or
        float32.
        """
        panel = kernels.panel_shapes[dtype].outputs
        parts = [_pack(weight, panel) for weight in weights]
        # whole panels are read, wherever one begins
        padded = None if bias is None else F.pad(bias, (0, panel))
        return cls(kernels, Blocks(parts, padded, weights[0].shape[1], dtype, out_dtype or dtype))

    def quantize_rows(self) -> None:
        """Quantize rows to int8 from now on. Copies of `packed` do not."""
        self.state = msgspec.structs.replace(self.state, is_int8=True)
        self.packed.is_int8 = True

    def __call__(self, x: Tensor) -> Tensor:
        shape = x.shape[0], self.packed.outputs
        if self._logits_memory is not None:
            out = self._logits_memory.take(*shape)
        else:
            out = x.new_empty(shape, dtype=self.state.out_dtype)
        self.kernels.linear(self.packed, x, out)
        return out


class BlockEmbedding:
    """Rows of such a weight, by their numbers: [T] -> [T, in]."""

    def __init__(self, linear: BlockLinear, dtype: torch.dtype) -> None:
        """`linear` is for numbers of `dtype`, and goes on to be used for products."""
        self.linear, self.dtype = linear, dtype
        self.packed = linear.packed
        self.shape = (self.packed.outputs, self.packed.inputs)

    def __call__(self, ids: Tensor) -> Tensor:
        out = torch.empty(ids.numel(), self.shape[1], dtype=self.dtype)
        self.linear.kernels.embed(self.packed, ids, out)
        return out


def _block_part(part: PartState) -> BlockPart:
    return BlockPart(
        panels=part.panels.data_ptr(),
        outputs=part.outputs,
        bits=part.bits,
        group=part.group,
        per_super=part.per_super,
        has_offset=part.has_offset,
        zero=part.zero,
        panel_bytes=part.panels.shape[1],
    )


def _pack(weight: QuantizedWeight, panel: int) -> PartState:
    """The weight in panels, and what tells of them."""
    num_outputs, num_inputs = weight.shape
    first = weight.rows(slice(0, 1)).codes()
    layout = _layout(first, panel)
    packed = torch.empty(-(-num_outputs // panel), layout.itemsize, dtype=torch.uint8)
    packed[-1:] = 0  # of outputs that there are not
    panels = packed.numpy().view(layout)[:, 0]
    at_once = min(panel, max(1, _PIECE // num_inputs))
    for begin in range(0, num_outputs, panel):
        end = min(begin + panel, num_outputs)
        for start in range(begin, end, at_once):
            rows = slice(start, min(start + at_once, end))
            column = slice(rows.start - begin, rows.stop - begin)
            _lay_out(weight.rows(rows).codes(), panels[begin // panel], column)
    num_groups = first.scales.shape[1]
    return PartState(
        panels=packed,
        outputs=num_outputs,
        bits=first.bits,
        group=num_inputs // num_groups,
        per_super=0 if first.supers is None else num_groups // first.supers.shape[1],
        has_offset=first.offsets is not None,
        zero=first.zero + (_SIGN if first.bits == 8 else 0),
    )


def _layout(codes: Codes, panel: int) -> np.dtype[np.void]:
    """A panel of a weight whose rows are like those of `codes`: see kernels/src/weight.h."""

    def by_output(name: str, numbers: Tensor | None) -> list[_Field]:
        return [] if numbers is None else [(name, numbers[:0].numpy().dtype, (panel,))]

    num_groups = codes.scales.shape[1]
    words = codes.values.shape[1] // num_groups * codes.bits // 32
    group = [
        *by_output("scales", codes.scales),
        *by_output("offsets", codes.offsets),
        ("words", np.dtype(np.uint32), (words, panel)),
    ]
    num_supers = num_groups if codes.supers is None else codes.supers.shape[1]
    one = [
        *by_output("supers", codes.supers),
        *by_output("super_offsets", codes.super_offsets),
        ("groups", np.dtype(group), (num_groups // num_supers,)),
    ]
    return np.dtype([("supers", np.dtype(one), (num_supers,))])


def _lay_out(codes: Codes, panel: np.void, columns: slice) -> None:
    """Put some outputs at their places in a panel."""
    supers = panel["supers"]
    groups = supers["groups"]
    for to, numbers in (
        (groups, (("scales", codes.scales), ("offsets", codes.offsets))),
        (supers, (("supers", codes.supers), ("super_offsets", codes.super_offsets))),
    ):
        for name, values in numbers:
            if values is not None:
                to[name][..., columns] = values.numpy().T.reshape(*to.shape, -1)
    # the bytes of 4 inputs, in the order 0, 2, 1, 3
    bytes_ = codes.values.numpy().view(np.uint32)
    words = bytes_ & 0xFF0000FF | (bytes_ & 0xFF00) << 8 | (bytes_ >> 8) & 0xFF00
    if codes.bits == 8:
        words ^= _SIGN * 0x01010101
    else:
        words = words[:, ::2] | words[:, 1::2] << 4
    groups["words"][..., columns] = words.T.reshape(*groups["words"].shape[:-1], -1)
