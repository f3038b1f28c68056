"""Matrix products by our own kernel, on weights in its layout. Knows nothing about models."""

import torch
from torch import Tensor

from aioserve.kernels import Kernels
from aioserve.kernels.structs import PackedWeight, pack_bias, pack_weight


class PanelLinear:
    """x @ weight.T + bias by our own kernel, on a weight in its layout.

    Measured on 2 cores, the products of one step of a 135M model, to those of oneDNN on its own
    layout: bfloat16 with avx512_bf16 (Zen 5) 0.70 at 1 row, 0.79 at 16, 0.87 at 64, 1.04 at 2,048;
    with amx_bf16 (Xeon, shared) 0.55 at 1 row, 0.53 at 16, 0.97 at 64, 0.6 at 512.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """`out_dtype` is that of the weight (None), or float32."""
        self._kernels, self._out_dtype = kernels, out_dtype or weight.dtype
        shape = kernels.panel_shapes[weight.dtype]
        self._weight = pack_weight(weight, shape)
        self._bias = None if bias is None else pack_bias(bias, shape)
        self.packed = PackedWeight(
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            *weight.shape[::-1],
            None,
            0,
            self._out_dtype is not weight.dtype,
        )

    @staticmethod
    def serves(kernels: Kernels, weight: Tensor) -> bool:
        """Whether there is a kernel for this weight."""
        return weight.dtype in kernels.panel_shapes and weight.shape[1] % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.packed.outputs, dtype=self._out_dtype)
        self._kernels.linear(self.packed, x, out)
        return out
