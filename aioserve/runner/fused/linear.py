"""Matrix products with a weight that never changes: laid out once for oneDNN, where torch has it.

Knows nothing about models.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Measured on 2 cores with avx512_bf16, the products of one step of a 135M model, to plain
# F.linear: bfloat16 0.70 at 1 row, 0.73 at 16, 0.82 at 64, 0.95 at 512; float32 0.44, 0.38, 0.39,
# 0.43. float16 has products of its own on few CPUs.
PACKED_DTYPES = (torch.bfloat16, torch.float32)
_ROWS_HINT = 16  # the layout for this number of rows serves all numbers as well as their own


class PlainLinear:
    """x @ weight.T + bias on the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """The same on a copy of the weight in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return out


def pack_linear(weight: Tensor, bias: Tensor | None) -> PlainLinear | PackedLinear:
    """The faster of the two for this machine and type."""
    can_pack = (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and weight.device.type == "cpu"
        and weight.dtype in PACKED_DTYPES
    )
    return PackedLinear(weight, bias) if can_pack else PlainLinear(weight, bias)
