"""A fused decoder's operations by the compiled kernels of this CPU.

Knows which sizes they serve; knows nothing about model classes.
"""

from torch import Tensor

from aioserve.kernels import Kernels, KernelsUnavailableError, load_kernels
from aioserve.runner.attention.backend import KVCacheSpec, LayerAttention, ModelInputs
from aioserve.runner.attention.compiled import CompiledAttention
from aioserve.runner.fused.ops import (
    Activation,
    AttentionLayer,
    Linear,
    Ops,
    RMSNorm,
    TorchOps,
)
from aioserve.runner.fused.panels import PanelLinear

_MULTIPLE = 16  # numbers in a row


class CompiledOps(TorchOps):
    """Kernels, also for the products if there are some; one call per operation, nothing checked."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if PanelLinear.serves(self._kernels, weight):
            return PanelLinear(self._kernels, weight, bias)
        return super().linear(weight, bias)

    def begin(self, inputs: ModelInputs, attention: LayerAttention) -> None:
        assert isinstance(attention, CompiledAttention)  # both are chosen by `why_not`
        self._compiled = attention
        self._positions, self._slots = inputs.positions, inputs.slots

    def rms_norm(self, x: Tensor, norm: RMSNorm, out: Tensor) -> None:
        self._kernels.rms_norm(x, norm.weight, norm.eps, out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: RMSNorm, out: Tensor) -> None:
        self._kernels.add_rms_norm(x, residual, norm.weight, norm.eps, out)

    def gate(self, x: Tensor, activation: Activation, out: Tensor) -> None:
        if activation == "silu":
            self._kernels.silu_and_mul(x, out)
        elif activation == "gelu_tanh":
            self._kernels.gelu_tanh_and_mul(x, out)
        else:
            super().gate(x, activation, out)

    def attend(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        backend, index = self._compiled, layer.index
        query_norm, key_norm = layer.head_norms or (None, None)
        self._kernels.rope_store(
            qkv,
            layer.cos_sin,
            self._positions,
            self._slots,
            backend.key_caches[index],
            backend.value_caches[index],
            layer.num_heads,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            0.0 if query_norm is None else query_norm.eps,
        )
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        attended = backend.attend(
            index,
            heads[:, : layer.num_heads],
            scaling=layer.scaling,
            sliding_window=layer.sliding_window,
            softcap=layer.softcap,
        )
        return attended.view(len(qkv), -1)


def create_ops(spec: KVCacheSpec, row_sizes: set[int]) -> Ops:
    """The fastest operations here, for rows of these sizes and the attention of `spec`."""
    if CompiledAttention.why_not(spec) or any(size % _MULTIPLE for size in row_sizes):
        return TorchOps()
    try:
        return CompiledOps(load_kernels())
    except KernelsUnavailableError:
        return TorchOps()
