"""Where a model computes, as far as fusing it has to know: its device, operations, attention.

`CPU` is one; `cuda.fused` has the other. Knows nothing about model classes.
"""

from abc import ABC, abstractmethod

import torch

from aioserve.runner.attention import StepInputs, create_attention_backend
from aioserve.runner.attention.backend import KVCacheSpec, LayerAttention, ModelInputs
from aioserve.runner.fused.compiled import create_ops
from aioserve.runner.fused.ops import Ops


class Place(ABC):
    """A kind of machine."""

    device: torch.device

    @abstractmethod
    def create_ops(self, spec: KVCacheSpec, row_sizes: set[int]) -> Ops:
        """The fastest operations here, for rows of these sizes and the attention of `spec`."""

    @abstractmethod
    def begin_alone(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int, step: StepInputs
    ) -> tuple[ModelInputs, LayerAttention]:
        """One step on a KV cache of its own, made for it."""


class _CPU(Place):
    device = torch.device("cpu")

    def create_ops(self, spec: KVCacheSpec, row_sizes: set[int]) -> Ops:
        return create_ops(spec, row_sizes)

    def begin_alone(
        self, spec: KVCacheSpec, num_blocks: int, block_size: int, step: StepInputs
    ) -> tuple[ModelInputs, LayerAttention]:
        backend = create_attention_backend(spec, num_blocks, block_size)
        backend.prepare(step)
        return ModelInputs.of(step), backend


CPU: Place = _CPU()
