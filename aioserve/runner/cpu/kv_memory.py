"""The memory of the KV caches: address space at once, pages shortly before they are needed.

In pages of 2 MiB where the system has them (Linux alone): fewer addresses to look up. Then what
owns the caches, whatever computes attention on them, and what a step needs of their memory.
"""

import contextlib
import ctypes
import errno
import itertools
import logging
import math
import mmap
import os
import sys
import threading
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.runner.attention.backend import (
    KVCacheSpec,
    LayerAttention,
    StepInputs,
    WindowLayers,
)
from aioserve.scheduler.output import SchedulerOutput


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeros that take address space alone until they are written to. Raises `OSError`,
    `OverflowError`.

    With such pages, attention to long contexts, whose rows lie all over, took 0.86 to 0.94 of the
    time.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


# The memory of the KV caches: address space at once, pages shortly before they are needed. Knows
# layers, blocks and pages. Knows nothing about requests, or about what is stored.


logger = logging.getLogger(__name__)

AHEAD_TOKENS = 2048  # as many as a large step writes: in memory beyond the blocks in use
CHUNK_BYTES = 4 << 20  # given at once; a step that needs some of them waits for all: about 1 ms
_MADV_POPULATE_WRITE = 23  # Linux 5.14's mman.h
_libc = ctypes.CDLL(None, use_errno=True)


class KVMemory:
    """K and V of every layer: tensors `[num_blocks, num_kv_heads, block_size, row]` of zeros, with
    the `row` of `KVCacheSpec`.

    Block ids are handed out from 0 upwards, so the blocks in memory are the first ones: those that
    were ever in use, and `AHEAD_TOKENS` more. On Linux; elsewhere all are, from the start.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, block_size: int) -> None:
        """Raises `ConfigError` if the system does not promise so much memory."""
        self.num_blocks = num_blocks
        self.num_committed_blocks = 0
        shapes = [
            (num_blocks, layer.num_kv_heads, block_size, spec.row(head_dim))
            for layer in spec.layers
            for head_dim in (layer.key_head_dim, layer.value_head_dim)
        ]
        if sys.platform == "linux" and shapes:
            caches = self._reserve(shapes, spec.dtype)
        else:
            caches = [torch.zeros(shape, dtype=spec.dtype) for shape in shapes]  # or none
            self.num_committed_blocks = num_blocks
        self.key_caches, self.value_caches = caches[::2], caches[1::2]
        bytes_per_block = max(spec.bytes_per_token * block_size, 1)  # a model without attention
        self._num_ahead = -(-AHEAD_TOKENS // block_size)
        self._num_at_once = max(1, CHUNK_BYTES // bytes_per_block)
        self._num_wanted = 0  # blocks that the thread was told to commit
        self._lock = threading.Lock()  # held for one chunk
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aioserve-kv-memory")

    def commit(self, num_blocks: int, soon: int = 0) -> None:
        """Return when the first `num_blocks` blocks are in memory; to be called before a write.

        A page that a step must fault in itself costs it some microseconds, in each layer. A thread
        commits the first `soon` blocks, and some more, so that the next calls find them there.
        Raises `MemoryError` if the system has no more.
        """
        if num_blocks > self.num_committed_blocks:
            logger.debug("a step waits until %d KV blocks are in memory", num_blocks)
            self._commit(num_blocks)
        soon = min(max(num_blocks, soon) + self._num_ahead // 2, self.num_blocks)
        if soon > max(self.num_committed_blocks, self._num_wanted):
            self._num_wanted = min(soon + self._num_ahead // 2, self.num_blocks)
            self._thread.submit(self._commit, self._num_wanted)

    def release(self) -> None:
        """Give the pages back, between two steps: all is zeros again, and taken anew as it fills.
        Where memory is not taken so (not on Linux), the zeros alone.
        """
        with self._lock:
            if not hasattr(self, "_bytes"):
                for cache in (*self.key_caches, *self.value_caches):
                    cache.zero_()
                return
            address, size = ctypes.c_void_p(self._bytes.ctypes.data), len(self._bytes)
            if _libc.madvise(address, ctypes.c_size_t(size), mmap.MADV_DONTNEED):
                raise MemoryError(os.strerror(ctypes.get_errno()))
            self.num_committed_blocks = self._num_wanted = 0

    def close(self) -> None:
        """End the thread. The tensors stay as they are. Idempotent."""
        self._thread.shutdown()

    def _reserve(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
        """Tensors that take address space alone until they are written to."""
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        ends = list(itertools.accumulate(_whole_pages(size) for size in sizes))
        try:
            memory = map_memory(ends[-1])
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the system does not give {ends[-1] >> 20:,} MiB for the KV pool: {error} "
                "(cache.kv_cache_gib, cache.num_kv_blocks)"
            ) from error
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        self._begins = [end - _whole_pages(size) for end, size in zip(ends, sizes, strict=True)]
        self._strides = [size // self.num_blocks for size in sizes]  # bytes from block to block
        return [
            torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)
            for shape, begin in zip(shapes, self._begins, strict=True)
        ]

    def _commit(self, num_blocks: int) -> None:
        while self.num_committed_blocks < num_blocks:
            with self._lock:
                begin = self.num_committed_blocks
                end = min(begin + self._num_at_once, num_blocks)
                if begin < end:
                    for cache, stride in zip(self._begins, self._strides, strict=True):
                        first = cache + _whole_pages(begin * stride)  # those before are in memory
                        _populate(self._bytes[first : cache + _whole_pages(end * stride)])
                    self.num_committed_blocks = end


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _populate(pages: npt.NDArray[np.uint8]) -> None:
    """Have whole pages in memory, without the GIL. Raises `MemoryError`."""
    address, size = ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(len(pages))
    if not len(pages) or not _libc.madvise(address, size, _MADV_POPULATE_WRITE):
        return
    if (error := ctypes.get_errno()) != errno.EINVAL:
        raise MemoryError(f"no {len(pages):,} bytes for the KV pool: {os.strerror(error)}")
    pages[:: mmap.PAGESIZE] |= 0  # before Linux 5.14: a write to each page that changes nothing


class AttentionBackend(LayerAttention):
    """An attention backend, which owns the KV cache and is used from one thread: `prepare`, then
    `forward` once per layer.
    """

    description = ""  # for the log: what computes, and why nothing faster does

    def __init__(
        self,
        spec: KVCacheSpec,
        num_kv_blocks: int,
        block_size: int,
        windows: WindowLayers | None = None,
    ) -> None:
        """With `windows`, those layers have a pool of their own, and steps say where in it."""
        own = frozenset[int]() if windows is None else windows.layers
        others = [layer for layer in range(len(spec.layers)) if layer not in own]
        # `prepare` trusts that the blocks of its step are committed
        self.memory = KVMemory(spec.part(others), num_kv_blocks, block_size)
        self.window_memory: KVMemory | None = None
        self.window_layers = own
        places = [(layer, self.memory, index) for index, layer in enumerate(others)]
        if windows is not None:
            memory = self.window_memory = KVMemory(spec.part(own), windows.num_blocks, block_size)
            places += [(layer, memory, index) for index, layer in enumerate(sorted(own))]
        places.sort(key=lambda place: place[0])
        self.key_caches = [memory.key_caches[index] for _, memory, index in places]
        self.value_caches = [memory.value_caches[index] for _, memory, index in places]

    def close(self) -> None:
        """End the threads of the memory. Idempotent."""
        self.memory.close()
        if self.window_memory is not None:
            self.window_memory.close()

    @abstractmethod
    def prepare(self, step: StepInputs) -> None:
        """Derive what all layers of this step share."""


# What a step needs of the memory of the KV caches: the blocks that it writes to are there before.
# Knows blocks, and what a step says of them.


class StepMemory:
    """The memory of one backend. Used on the thread that computes."""

    def __init__(self, backend: AttentionBackend, block_size: int) -> None:
        self._memory, self._windows = backend.memory, backend.window_memory
        self._block_size = block_size
        self._memory.commit(0)  # a first step finds its blocks in memory, too
        if self._windows is not None:
            self._windows.commit(0)

    def commit(self, inputs: StepInputs, step: SchedulerOutput) -> None:
        """Have in memory what the step writes, and soon what was given with it. Raises
        `MemoryError`.
        """
        num_written = int(inputs.slot_mapping.max()) // self._block_size + 1
        self._memory.commit(num_written, soon=step.highest_new_block + 1)
        if inputs.windows is not None and self._windows is not None:
            num_written = int(inputs.windows.slot_mapping.max()) // self._block_size + 1
            self._windows.commit(num_written)

    def release(self) -> None:
        """Give back the memory of the KV cache while no request has blocks: steps take it again."""
        self._memory.release()
        if self._windows is not None:
            self._windows.release()
