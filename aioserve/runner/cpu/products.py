"""Matrix products on this CPU by our kernels, on plain or quantized weights.

Begins with memory for logits that is used again by the next step: malloc gives pages of more than
32 MiB back to the system when they are freed, so a step of 256 requests over 49,152 tokens paid 27
of its 43 ms for page faults (Zen 5). Knows nothing about models.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels import BlockPart, Kernels, PackedWeight, pack_bias, pack_weight

if TYPE_CHECKING:
    from aioserve.model_source.quantized_weight import Codes, QuantizedWeight

#: Takes in a row that need less than a quarter of the memory before it gets smaller; a guess.
PATIENCE = 1000


class LogitsMemory:
    """Hands out one piece of memory again and again, and never while a tensor still shows it. What
    only a burst of requests needed is given back after `PATIENCE` small steps.

    It belongs to one thread, as the model does.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0).numpy()
        #: Lives as long as any tensor over `_memory`, of whatever shape, does.
        self._shown: ReferenceType[memoryview] | None = None
        self._num_small = 0  # takes in a row

    def take(self, num_rows: int, num_columns: int, num_behind: int = 0) -> Tensor:
        """Return a float32 tensor [num_rows, num_columns] of any numbers. The memory that it shows
        goes on for `num_behind` more numbers of each row.
        """
        if not num_rows * num_columns:
            return torch.empty(num_rows, num_columns)
        size = num_rows * (num_columns + num_behind)
        self._num_small = self._num_small + 1 if size * 4 < self._memory.size else 0
        is_shown = self._shown is not None and self._shown() is not None
        if is_shown or size > self._memory.size or self._num_small > PATIENCE:
            self._memory = torch.empty(size).numpy()
        view = self._memory.data
        self._shown = ref(view)
        count = num_rows * num_columns
        return torch.frombuffer(view, dtype=torch.float32, count=count).view(num_rows, num_columns)


# Matrix products by our own kernel, on weights in its layout. Knows nothing about models.


class Panels(msgspec.Struct, frozen=True, tag="panels"):
    """A weight in the layout of the kernel, and its bias: what a `PanelLinear` is made of."""

    weight: Tensor  # as `pack_weight` has it
    bias: Tensor | None  # as `pack_bias` has it
    inputs: int
    outputs: int
    out_dtype: torch.dtype


class PanelLinear:
    """x @ weight.T + bias by our own kernel, on a weight in its layout.

    Measured on 2 cores, the products of one step of a 135M model, to those of oneDNN on its own
    layout: bfloat16 with avx512_bf16 (Zen 5) 0.70 at 1 row, 0.79 at 16, 0.87 at 64, 1.04 at 2,048;
    with amx_bf16 (Xeon, shared) 0.55 at 1 row, 0.53 at 16, 0.97 at 64, 0.6 at 512.
    """

    def __init__(self, kernels: Kernels, panels: Panels) -> None:
        self._kernels, self.state = kernels, panels
        self.packed = PackedWeight(
            panels.weight.data_ptr(),
            None if panels.bias is None else panels.bias.data_ptr(),
            panels.inputs,
            panels.outputs,
            None,
            0,
            panels.out_dtype is not panels.weight.dtype,
        )
        self._logits_memory = LogitsMemory() if self.packed.is_wide else None

    @classmethod
    def of(
        cls,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> "PanelLinear":
        """Lay out a `weight` [out, in]. `out_dtype` is that of the weight (None), or float32."""
        shape = kernels.panel_shapes[weight.dtype]
        packed_bias = None if bias is None else pack_bias(bias, shape)
        outputs, inputs = weight.shape
        packed = pack_weight(weight, shape)
        return cls(kernels, Panels(packed, packed_bias, inputs, outputs, out_dtype or weight.dtype))

    @staticmethod
    def serves(kernels: Kernels, weight: Tensor) -> bool:
        """Return whether there is a kernel for this weight."""
        return weight.dtype in kernels.panel_shapes and weight.shape[1] % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        shape = x.shape[0], self.packed.outputs
        if self._logits_memory is not None:
            out = self._logits_memory.take(*shape)
        else:
            out = x.new_empty(shape, dtype=self.state.out_dtype)
        self._kernels.linear(self.packed, x, out)
        return out


# Matrix products by our own kernels with quantized weights, which stay that small in memory. Knows
# how the kernels want them; knows nothing about files, formats or models.


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
    the weights are exact. From `Kernels.rounded_from` rows of bfloat16 on it changes nothing.
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
        weights: "Sequence[QuantizedWeight]",
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

    @property
    def alone_below(self) -> float:
        """How many rows are too many for each to have the result that it has alone."""
        return self.kernels.rounded_from if self.state.dtype is torch.bfloat16 else math.inf

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


def _pack(weight: "QuantizedWeight", panel: int) -> PartState:
    """Return the weight in panels, and what tells of them."""
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


def _layout(codes: "Codes", panel: int) -> np.dtype[np.void]:
    """Return a panel of a weight whose rows are like those of `codes`: see kernels/src/weight.h."""

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


def _lay_out(codes: "Codes", panel: np.void, columns: slice) -> None:
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
