"""A fused decoder's operations on the CPU: by our compiled kernels, or by torch on packed weights.

Knows the seams of `runner.fused`, and which sizes the kernels serve; knows nothing about model
classes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.kernels import Kernels, KernelsUnavailableError, load_kernels
from aioserve.model_source.quantized import QuantizedWeight
from aioserve.runner.attention.backend import (
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    RowStates,
    StepInputs,
)
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.blocks import BlockEmbedding, BlockLinear
from aioserve.runner.cpu.compiled_attention import CompiledAttention, create_attention_backend
from aioserve.runner.cpu.experts import CompiledExperts, CompiledMixture
from aioserve.runner.cpu.linear import pack_linear
from aioserve.runner.cpu.low_rank import CompiledProduct, CompiledTable
from aioserve.runner.cpu.panels import PanelLinear
from aioserve.runner.cpu.rows import PagedRows
from aioserve.runner.cpu.state_steps import with_own_steps
from aioserve.runner.cpu.whole_decoder import WholeDecoder
from aioserve.runner.fused.decoder import DecoderLayer, FusedDecoder
from aioserve.runner.fused.ops import (
    Activation,
    AttentionLayer,
    Embedding,
    ExpertActivation,
    Experts,
    ExpertWeights,
    Linear,
    Mixture,
    Ops,
    RMSNorm,
    Router,
    TorchOps,
)
from aioserve.runner.fused.place import Place
from aioserve.runner.low_rank import LowRankProduct, LowRankTable, Piece
from aioserve.runner.tensor_parallel.group import Ranks

_MULTIPLE = 16  # numbers in a row


class PackedOps(TorchOps):
    """Plain torch, on weights that are laid out once."""

    def linear(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if out_dtype not in (None, weight.dtype):
            return super().linear(weight, bias, out_dtype)
        return pack_linear(weight, bias)


class CompiledOps(PackedOps):
    """Kernels, also for the products if there are some; one call per operation, nothing checked."""

    is_compiled = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(
        self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Linear:
        if PanelLinear.serves(self._kernels, weight):
            return PanelLinear.of(self._kernels, weight, bias, out_dtype)
        return super().linear(weight, bias, out_dtype)

    def quantized_linear(
        self,
        weights: Sequence[QuantizedWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Linear | None:
        return BlockLinear.of(self._kernels, weights, bias, dtype, out_dtype)

    def experts(
        self, router: Router, activation: ExpertActivation, weights: Iterable[ExpertWeights]
    ) -> Experts | None:
        if not CompiledExperts.serves(activation):
            return None
        return CompiledExperts(self._kernels, router, activation, weights)

    def mixture(
        self, activation: ExpertActivation, weights: Iterable[ExpertWeights], dtype: torch.dtype
    ) -> Mixture | None:
        if not CompiledMixture.serves(activation):
            return None
        return CompiledMixture(self._kernels, activation, weights, dtype)

    def quantized_embedding(self, head: Linear, dtype: torch.dtype) -> Embedding | None:
        return BlockEmbedding(head, dtype) if isinstance(head, BlockLinear) else None

    def low_rank_product(self, pieces: Sequence[Piece]) -> LowRankProduct:
        if CompiledProduct.serves(pieces):
            return CompiledProduct(self._kernels, pieces)
        return super().low_rank_product(pieces)

    def low_rank_table(self, piece: Piece) -> LowRankTable:
        return CompiledTable(self._kernels, piece)

    def begin(self, inputs: ModelInputs, attention: LayerAttention) -> None:
        assert isinstance(attention, CompiledAttention)  # both are chosen by `why_not`
        self._compiled = attention
        self._positions = inputs.positions

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
            backend.tables_of(index).slots,
            backend.key_caches[index],
            backend.value_caches[index],
            layer.num_heads,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            0.0 if query_norm is None else query_norm.eps,
        )
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        attended = backend.attend(index, heads[:, : layer.num_heads], layer.options)
        return attended.view(len(qkv), -1)


class CpuPlace(Place):
    """This machine, with or without compiled kernels."""

    device = torch.device("cpu")

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks

    @property
    def multiplies_blocks(self) -> bool:  # type: ignore[override]
        try:
            load_kernels()
        except KernelsUnavailableError:
            return False
        return True

    def available_memory(self) -> int:
        return machine.available_memory()

    def create_ops(self, spec: KVCacheSpec, row_sizes: set[int]) -> Ops:
        if CompiledAttention.why_not(spec) or any(size % _MULTIPLE for size in row_sizes):
            return PackedOps()
        try:
            return CompiledOps(load_kernels())
        except KernelsUnavailableError:
            return PackedOps()

    def create_products(self) -> Ops:
        return CompiledOps(load_kernels()) if self.multiplies_blocks else PackedOps()

    def begin_alone(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int, step: StepInputs
    ) -> tuple[ModelInputs, LayerAttention]:
        backend = create_attention_backend(spec, num_blocks, block_size)
        backend.prepare(step)
        return ModelInputs.of(step), backend

    def own_forward(
        self, module: nn.Module, known: Callable[[], Tensor | None]
    ) -> Callable[..., Any]:
        return with_own_steps(module, known)

    def create_row_states(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int
    ) -> RowStates | None:
        return PagedRows(spec, num_blocks, block_size) if self.ranks is None else None

    def create_whole_decoder(
        self,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        ops: Ops,
    ) -> FusedDecoder | None:
        if not WholeDecoder.serves(layers, head):
            return None
        return WholeDecoder(embedding, layers, norm, head, ops)
