"""Where a model computes, as far as fusing it has to know: its device, operations, attention.

`cpu.fused` has one and `cuda.fused` the other. Knows nothing about model classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.runner.attention.backend import (
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    RowStates,
    StepInputs,
)
from aioserve.runner.fused.decoder import DecoderLayer, FusedDecoder
from aioserve.runner.fused.ops import Embedding, Linear, Ops, RMSNorm, TorchOps
from aioserve.runner.tensor_parallel.group import Ranks


class Place(ABC):
    """A kind of machine that runs fused decoders: it makes operations, caches and decoders."""

    device: torch.device
    ranks: Ranks | None = None  # the processes with the rest of the weights; None: all are here
    multiplies_blocks = False  # whether quantized weights are served as they are stored

    def available_memory(self) -> int | None:
        """Bytes that weights could take yet, as far as that is known."""
        return None

    @abstractmethod
    def create_ops(self, spec: KVCacheSpec, row_sizes: set[int]) -> Ops:
        """The fastest operations here, for rows of these sizes and the attention of `spec`."""

    def create_products(self) -> Ops:
        """The fastest products here, of operations whose others are not asked for."""
        return TorchOps()

    @abstractmethod
    def begin_alone(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int, step: StepInputs
    ) -> tuple[ModelInputs, LayerAttention]:
        """One step on a KV cache of its own, made for it."""

    def own_forward(
        self, module: nn.Module, known: Callable[[], Tensor | None]
    ) -> Callable[..., Any]:
        """The forward pass of a layer with states, of whose pieces these are `known`, by the steps
        that are fastest here.
        """
        return MethodType(type(module).forward, module)

    def create_row_states(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int
    ) -> RowStates | None:
        """A KV cache for models that read whole rows of it; None if there is none here."""
        return None

    def create_whole_decoder(
        self,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        ops: Ops,
    ) -> FusedDecoder | None:
        """A decoder that does the same in one call; None if there is none here for these layers."""
        return None
