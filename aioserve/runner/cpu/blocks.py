"""Matrix products by our own kernels with weights of a few bits, which stay that small in memory.

Knows how the kernels want them; knows nothing about files, formats or models.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels import Kernels
from aioserve.kernels.structs import BlockPart, PackedWeight, PanelShape
from aioserve.model_source.quantized import Codes, QuantizedWeight

_PIECE = 1 << 14  # weights packed at a time: few enough that torch calls no second thread


class BlockLinear:
    """x @ weight.T + bias for weights [out_i, in] one below the other, each in its own format.

    The results are those of the weights in float32, but in bfloat16 where the kernels multiply
    pairs of bfloat16 numbers: there, to the bit, those of the weights rounded to it.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[QuantizedWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.kernels = kernels
        shape = kernels.block_shapes[dtype]
        packed = [_pack(weight, shape) for weight in weights]
        self._bytes = [data for data, _ in packed]
        self._parts = (BlockPart * len(packed))(*(part for _, part in packed))
        # whole panels are read, wherever one begins
        self._bias = None if bias is None else F.pad(bias, (0, shape.outputs))
        self.packed = PackedWeight(
            None,
            None if self._bias is None else self._bias.data_ptr(),
            weights[0].shape[1],
            sum(weight.shape[0] for weight in weights),
            self._parts,
            len(self._parts),
        )

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.packed.outputs)
        self.kernels.linear(self.packed, x, out)
        return out


class BlockEmbedding:
    """Rows of such a weight, by their numbers: [T] -> [T, in]."""

    def __init__(self, linear: BlockLinear, dtype: torch.dtype) -> None:
        """`linear` is for numbers of `dtype`, and goes on to be used for products."""
        self._linear, self.dtype = linear, dtype
        self.packed = linear.packed
        self.shape = (self.packed.outputs, self.packed.inputs)

    def __call__(self, ids: Tensor) -> Tensor:
        out = torch.empty(ids.numel(), self.shape[1], dtype=self.dtype)
        self._linear.kernels.embed(self.packed, ids, out)
        return out


def _pack(weight: QuantizedWeight, shape: PanelShape) -> tuple[Tensor, BlockPart]:
    """The bytes of `block_part` in C, and what tells of them."""
    num_outputs, num_inputs = weight.shape
    at_once = max(1, _PIECE // num_inputs // shape.outputs) * shape.outputs
    pieces = [
        _pack_panels(weight.rows(slice(start, start + at_once)).codes(), shape)
        for start in range(0, num_outputs, at_once)
    ]
    packed, codes = torch.cat(pieces), weight.rows(slice(0, 1)).codes()
    num_groups = codes.scales.shape[1]
    part = BlockPart(
        panels=packed.data_ptr(),
        outputs=num_outputs,
        bits=codes.bits,
        group=num_inputs // num_groups,
        per_super=0 if codes.supers is None else num_groups // codes.supers.shape[1],
        has_offset=codes.offsets is not None,
        zero=codes.zero,
        panel_bytes=packed.shape[1],
    )
    return packed, part


def _pack_panels(codes: Codes, shape: PanelShape) -> Tensor:
    """Bytes [panels, panel_bytes]."""
    num_outputs, num_inputs = codes.values.shape
    num_panels, num_groups = -(-num_outputs // shape.outputs), codes.scales.shape[1]

    def by_panel(numbers: Tensor) -> Tensor:
        """[out, n] as [panels, n, bytes of the n-th number of all outputs]."""
        padded = F.pad(numbers, (0, 0, 0, num_panels * shape.outputs - num_outputs))
        panels = padded.view(num_panels, shape.outputs, -1).transpose(1, 2).contiguous()
        return panels.view(torch.uint8)

    # `depth` inputs of an output lie side by side
    values = by_panel(codes.values).view(num_panels, -1, shape.depth, shape.outputs)
    values = values.transpose(2, 3).reshape(num_panels, num_inputs // shape.depth, -1)
    if codes.bits == 4:
        low, high = values.chunk(2, dim=2)
        values = low | high << 4
    offsets = () if codes.offsets is None else (by_panel(codes.offsets),)
    groups = (by_panel(codes.scales), *offsets, values.reshape(num_panels, num_groups, -1))
    packed = torch.cat(groups, dim=2)
    if codes.supers is not None:
        offsets = () if codes.super_offsets is None else (by_panel(codes.super_offsets),)
        num_supers = codes.supers.shape[1]
        supers = (by_panel(codes.supers), *offsets, packed.view(num_panels, num_supers, -1))
        packed = torch.cat(supers, dim=2)
    return packed.flatten(1)
