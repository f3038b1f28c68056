"""Matrix products by our own kernel, on weights in its layout. Knows nothing about models."""

import msgspec
import torch
from torch import Tensor

from aioserve.kernels import Kernels
from aioserve.kernels.structs import PackedWeight, pack_bias, pack_weight
from aioserve.runner.cpu.logits_memory import LogitsMemory


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
        """Whether there is a kernel for this weight."""
        return weight.dtype in kernels.panel_shapes and weight.shape[1] % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        shape = x.shape[0], self.packed.outputs
        if self._logits_memory is not None:
            out = self._logits_memory.take(*shape)
        else:
            out = x.new_empty(shape, dtype=self.state.out_dtype)
        self._kernels.linear(self.packed, x, out)
        return out
