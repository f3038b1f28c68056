"""This machine as a place where a model is loaded: which operations serve it, and which decoder.

Loaded for a model that no earlier start has prepared. Knows no files and no model classes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.runner.attention.backend import (
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    RowStates,
    StepInputs,
)
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.attention import CompiledAttention, create_attention_backend
from aioserve.runner.cpu.fused import CompiledOps, PackedOps, WholeDecoder
from aioserve.runner.fused.decoder import DecoderLayer, FusedDecoder, Place
from aioserve.runner.fused.ops import Embedding, Linear, Ops, RMSNorm

if TYPE_CHECKING:
    from aioserve.runner.ranks import Ranks

_MULTIPLE = 16  # numbers in a row


class CpuPlace(Place):
    """This machine, with or without compiled kernels."""

    device = torch.device("cpu")

    def __init__(self, ranks: "Ranks | None" = None) -> None:
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
        why_not = CompiledAttention.why_not(spec)
        for size in sorted(row_sizes):
            if why_not is None and size % _MULTIPLE:
                why_not = f"rows of {size} are not served, only multiples of {_MULTIPLE}"
        return PackedOps(why_not) if why_not else self.create_products()

    def create_products(self) -> Ops:
        try:
            return CompiledOps(load_kernels())
        except KernelsUnavailableError as error:
            return PackedOps(str(error))

    def begin_alone(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int, step: StepInputs
    ) -> tuple[ModelInputs, LayerAttention]:
        backend = create_attention_backend(spec, num_blocks, block_size)
        backend.prepare(step)
        return ModelInputs.of(step), backend

    def own_forward(
        self, module: nn.Module, known: Callable[[], Tensor | None]
    ) -> Callable[..., Any]:
        from aioserve.support.parts import load

        made: Callable[..., Any] = load("states on a cpu", "steps")(module, known)
        return made

    def create_row_states(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int
    ) -> RowStates | None:
        if self.ranks is not None:
            return None
        from aioserve.runner.cpu.torch_attention import PagedRows

        return PagedRows(spec, num_blocks, block_size)

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
