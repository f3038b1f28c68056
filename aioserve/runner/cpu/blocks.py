"""Matrix products by our own kernels with weights of a few bits, which stay that small in memory.

Knows how the kernels want them; knows nothing about files, formats or models.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels import Kernels
from aioserve.kernels.structs import BlockPart, PackedWeight
from aioserve.model_source.quantized import Codes, QuantizedWeight

_PIECE = 1 << 14  # weights packed at a time: few enough that torch calls no second thread
_SIGN = 128  # added to codes of 8 bits with a sign
_ORDER = [0, 2, 1, 3]  # of inputs whose codes lie in 32 bits: see kernels/src/weight.h


class BlockLinear:
    """x @ weight.T + bias for weights [out_i, in] one below the other, each in its own format.

    In float32 the results are those of the weights in float32. Of two-byte types, inputs become
    whole numbers of 16 bits, or of 12, that share a scale among 32; the weights are exact.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[QuantizedWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.kernels = kernels
        panel = kernels.panel_shapes[dtype].outputs
        packed = [_pack(weight, panel) for weight in weights]
        self._bytes = [data for data, _ in packed]
        self._parts = (BlockPart * len(packed))(*(part for _, part in packed))
        # whole panels are read, wherever one begins
        self._bias = None if bias is None else F.pad(bias, (0, panel))
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


def _pack(weight: QuantizedWeight, panel: int) -> tuple[Tensor, BlockPart]:
    """The bytes of `block_part` in C, and what tells of them."""
    num_outputs, num_inputs = weight.shape
    at_once = max(1, _PIECE // num_inputs // panel) * panel
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pieces are small: several would mostly wait for each other
    try:
        pieces = [
            _pack_panels(weight.rows(slice(start, start + at_once)).codes(), panel)
            for start in range(0, num_outputs, at_once)
        ]
    finally:
        torch.set_num_threads(threads)
    packed, codes = torch.cat(pieces), weight.rows(slice(0, 1)).codes()
    num_groups = codes.scales.shape[1]
    part = BlockPart(
        panels=packed.data_ptr(),
        outputs=num_outputs,
        bits=codes.bits,
        group=num_inputs // num_groups,
        per_super=0 if codes.supers is None else num_groups // codes.supers.shape[1],
        has_offset=codes.offsets is not None,
        zero=codes.zero + (_SIGN if codes.bits == 8 else 0),
        panel_bytes=packed.shape[1],
    )
    return packed, part


def _pack_panels(codes: Codes, panel: int) -> Tensor:
    """Bytes [panels, panel_bytes]."""
    num_outputs, num_groups = codes.values.shape[0], codes.scales.shape[1]
    num_panels = -(-num_outputs // panel)

    def by_panel(numbers: Tensor) -> Tensor:
        """[out, n, ...] as [panels, n, bytes of the n-th numbers of all outputs]."""
        missing = num_panels * panel - num_outputs
        padded = torch.cat((numbers, numbers.new_zeros(missing, *numbers.shape[1:])))
        panels = padded.view(num_panels, panel, numbers.shape[1], -1).transpose(1, 2)
        return panels.contiguous().flatten(2).view(torch.uint8)

    values = codes.values.view(torch.uint8)
    if codes.bits == 8:
        values = values + _SIGN  # and the carry is lost
    values = values.view(num_outputs, -1, 4)[..., _ORDER]
    if codes.bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    offsets = () if codes.offsets is None else (by_panel(codes.offsets),)
    groups = (by_panel(codes.scales), *offsets, by_panel(values).view(num_panels, num_groups, -1))
    packed = torch.cat(groups, dim=2)
    if codes.supers is not None:
        offsets = () if codes.super_offsets is None else (by_panel(codes.super_offsets),)
        num_supers = codes.supers.shape[1]
        supers = (by_panel(codes.supers), *offsets, packed.view(num_panels, num_supers, -1))
        packed = torch.cat(supers, dim=2)
    return packed.flatten(1)
