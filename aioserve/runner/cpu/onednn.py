"""Matrix products with a weight that never changes: laid out once for oneDNN, where torch has it.

For models that our kernels do not compute. Knows nothing about models.
"""

import functools
import logging

import torch
from torch import Tensor

from aioserve.runner.fused.ops import PlainLinear

logger = logging.getLogger(__name__)

# Measured on 2 cores with avx512_bf16, the products of one step of a 135M model, to plain
# F.linear: bfloat16 0.70 at 1 row, 0.73 at 16, 0.82 at 64, 0.95 at 512; float32 0.44, 0.38, 0.39,
# 0.43. float16 is like float32, where oneDNN has it.
_ROWS_HINT = 16  # the layout for this number of rows serves all numbers as well as their own


class PackedLinear:
    """x @ weight.T + bias on a copy of the weight in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return out


def pack_linear(weight: Tensor, bias: Tensor | None) -> PlainLinear | PackedLinear:
    """Return the faster layout for this machine and type."""
    kind = PackedLinear if _can_pack(weight.dtype) else PlainLinear
    return kind(weight, bias)


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of this type here; if not, the log says why,
    once.

    Tried, on a small weight: which types it takes on which CPU changes with its version.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.rand(n, 64, generator=generator).to(dtype) for n in (48, 3))
    try:
        found, expected = PackedLinear(weight, None)(x), x.double() @ weight.double().T
    except (AttributeError, RuntimeError) as error:  # a torch without it, a CPU without it
        reason = str(error)
    else:
        # sums of 64 products in [0, 1): in any order in float32, rounded more than once in others
        if torch.allclose(found.double(), expected, rtol=max(1e-5, 4 * torch.finfo(dtype).eps)):
            return True
        reason = "oneDNN's results are wrong"
    logger.info("%s weights are not packed, which costs some speed: %s", dtype, reason)
    return False
