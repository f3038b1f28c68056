"""Paged attention on the CPU by the compiled kernels, one call per layer; and the choice of a way.

`torch_attention` has the others: plain torch, where the kernels do not go, and whole rows for a
model that attends itself. Knows which shapes the kernels serve; knows nothing about requests or
models.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioserve.kernels import Kernels, KernelsUnavailableError, load_kernels
from aioserve.runner.attention.backend import (
    AttentionOptions,
    KVCacheSpec,
    StepInputs,
    WindowLayers,
)
from aioserve.runner.cpu.kv_memory import AttentionBackend

MAX_HEAD_DIM = 256  # beyond, a thread's buffers would outgrow the second-level cache


class Tables(NamedTuple):
    """The places of K and V of a step: slots to write, and blocks to read."""

    slots: Tensor  # int64 [T]
    blocks: Tensor  # int32 [R, W]

    @classmethod
    def of(cls, step: StepInputs) -> "Tables":
        """Return the tables of a step, in memory that numpy and torch share."""
        blocks = np.ascontiguousarray(step.block_table)
        return cls(torch.from_numpy(step.slot_mapping), torch.from_numpy(blocks))


class CompiledAttention(AttentionBackend):
    """One call of the kernels stores and one attends, whatever a step holds."""

    def __init__(
        self,
        kernels: Kernels,
        spec: KVCacheSpec,
        num_kv_blocks: int,
        block_size: int,
        windows: WindowLayers | None = None,
        *,
        in_bytes: bool = False,
    ) -> None:
        """With `in_bytes`, products with K and V that are int8 round the other side, too, where
        `Kernels.paged_attention` does.
        """
        super().__init__(spec, num_kv_blocks, block_size, windows)
        self._kernels = kernels
        self.in_bytes = in_bytes and spec.dtype is torch.int8
        self._value_dims = [layer.value_head_dim for layer in spec.layers]
        self._prepared: StepInputs | None = None

    @staticmethod
    def why_not(spec: KVCacheSpec) -> str | None:
        """Return the part of `spec` that the kernels do not serve; None if they serve it all."""
        if spec.dtype not in Kernels.dtypes | {torch.int8}:
            return f"{spec.dtype} is not served"
        for layer in spec.layers:
            for dim in (layer.key_head_dim, layer.value_head_dim):
                if dim % 16 or dim > MAX_HEAD_DIM:
                    return f"heads of {dim} are not served, only multiples of 16 to {MAX_HEAD_DIM}"
        return None

    def prepare(self, step: StepInputs) -> None:
        if step is self._prepared:
            return  # its arrays have other numbers, and the tensors show them
        self._prepared = None  # if this raises
        self.tables = self.window_tables = Tables.of(step)
        if step.windows is not None:
            self.window_tables = Tables.of(step.windows)
        self._image_ends = step.image_ends
        self.query_start_loc = torch.from_numpy(step.query_start_loc)
        self.seq_lens = torch.from_numpy(step.seq_lens)
        self._prepared = step

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        slots = self.tables_of(layer).slots
        self._kernels.store_kv(_dense(key), slots, self.key_caches[layer])
        self._kernels.store_kv(_dense(value), slots, self.value_caches[layer])
        return self.attend(layer, _dense(query), options)

    def tables_of(self, layer: int) -> "Tables":
        """Return the tables of the step for this layer: its window's, if it has one."""
        return self.window_tables if layer in self.window_layers else self.tables

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """`forward` once K and V of all T tokens are in the cache, where `rope_store` puts them.

        The numbers of a head of `query` are contiguous, its tokens and heads need not be.
        """
        key_cache, value_cache = self.key_caches[layer], self.value_caches[layer]
        ends = self._image_ends and self._image_ends.within(options.sliding_window)
        out = query.new_empty(query.shape[0], query.shape[1], self._value_dims[layer])
        self._kernels.paged_attention(
            query,
            key_cache,
            value_cache,
            self.tables_of(layer).blocks,
            self.query_start_loc,
            self.seq_lens,
            out,
            scaling=options.scaling,
            sliding_window=options.sliding_window,
            chunk=options.chunk,
            softcap=options.softcap,
            sinks=None if options.sinks is None else options.sinks.float(),
            ends=None if ends is None else torch.from_numpy(ends),
            in_bytes=self.in_bytes,
        )
        return out


def create_attention_backend(
    spec: KVCacheSpec,
    num_kv_blocks: int,
    block_size: int,
    windows: WindowLayers | None = None,
    *,
    in_bytes: bool = False,
) -> AttentionBackend:
    """Allocate the KV cache behind the fastest backend that this machine can run.

    `in_bytes` allows products of bytes with an int8 cache, by the kernels alone. The `description`
    of the backend says which it is, and why not a faster one.
    """
    try:
        kernels = load_kernels()
        obstacle = CompiledAttention.why_not(spec)
    except KernelsUnavailableError as error:
        obstacle = str(error)
    if obstacle is None:
        compiled = CompiledAttention(
            kernels, spec, num_kv_blocks, block_size, windows, in_bytes=in_bytes
        )
        in_what = ", int8 products" if compiled.in_bytes else ""
        compiled.description = f"compiled kernels, {kernels.variant}{in_what}"
        backend: AttentionBackend = compiled
    else:
        from aioserve.runner.cpu.torch_attention import TorchPagedAttention

        backend = TorchPagedAttention(spec, num_kv_blocks, block_size, windows)
        backend.description = f"plain torch, without the compiled kernels: {obstacle}"
    return backend


def _dense(x: Tensor) -> Tensor:
    """Return the kernels want the numbers of a head side by side; tokens and heads may lie
    anywhere.
    """
    return x if x.stride(-1) == 1 else x.contiguous()
