"""The memory of the KV caches: address space at once, pages shortly before they are needed.

In pages of 2 MiB where the system has them (Linux alone): fewer addresses to look up. Then what
owns the caches, whatever computes attention on them, and what a step needs of their memory. Last,
how the memory of the machine is shared out: how many KV blocks to allocate, whether they fit, and
in which types a model computes here.
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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.runner.attention.backend import KVCacheSpec, LayerAttention, StepInputs, WindowLayers
from aioserve.runner.cpu import machine
from aioserve.runner.interface import max_useful_blocks
from aioserve.runner.load_plan import SideTypes
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
        """Raises `ConfigError` if the system does not promise the memory of `num_blocks` blocks."""
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
        """Make the tensors; with `windows`, those layers have a pool of their own."""
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
        self._num_given = 0  # blocks up to the highest that a request has got
        self._memory.commit(0)  # a first step finds its blocks in memory, too
        if self._windows is not None:
            self._windows.commit(0)

    def commit(self, inputs: StepInputs, step: SchedulerOutput) -> None:
        """Have in memory what the step writes, and soon what was given with it. Raises
        `MemoryError`.
        """
        if num_new := step.highest_new_block + 1:
            self._num_given = max(num_new, self._num_given)
        if num_new or not 0 < self._num_given <= self._memory.num_committed_blocks:
            num_written = int(inputs.slot_mapping.max()) // self._block_size + 1
            self._memory.commit(num_written, soon=num_new)
        if inputs.windows is not None and self._windows is not None:
            num_written = int(inputs.windows.slot_mapping.max()) // self._block_size + 1
            self._windows.commit(num_written)

    def release(self) -> None:
        """Give back the memory of the KV cache while no request has blocks: steps take it again."""
        self._num_given = 0
        self._memory.release()
        if self._windows is not None:
            self._windows.release()


# How this machine's memory is shared out: how many KV blocks to allocate, and whether they fit.


DEFAULT_MEMORY_SHARE = 0.25  # of what is free once the weights are loaded
DEFAULT_MEMORY_LIMIT = 4 << 30  # bytes
_WITHOUT_KV = {"linear_attention", "conv", "mlp", "moe"}  # types of layers
MIB, GIB = 1 << 20, 1 << 30


def check_memory(
    config: EngineConfig,
    weight_bytes: int,
    bytes_per_token: int | None,
    max_model_len: int,
    encoder_cache_bytes: int = 0,
) -> None:
    """Raise `ConfigError` if weights, and what the settings ask for besides, do not fit together.

    For use before anything is loaded: a system without memory ends the process without a word.
    """
    pool_bytes = 0
    sized = config.cache.num_kv_blocks is not None or config.cache.kv_cache_gib is not None
    if sized and bytes_per_token is not None:
        num_blocks = choose_num_kv_blocks(config, bytes_per_token, max_model_len)
        pool_bytes = num_blocks * config.cache.block_size * bytes_per_token
    outside = 0 if config.cache.kv_connector == "none" else int(config.cache.kv_connector_gib * GIB)
    available = machine.available_memory()
    if weight_bytes + pool_bytes + outside + encoder_cache_bytes > available:
        others = (
            ("the KV pool", pool_bytes),
            ("KV blocks outside of it", outside),
            ("the encoder cache", encoder_cache_bytes),
        )
        more = "".join(f" and {size / MIB:,.0f} MiB for {what}" for what, size in others if size)
        settings = "cache.kv_cache_gib, cache.num_kv_blocks, model.dtype"
        raise ConfigError(
            f"too little memory: {weight_bytes / MIB:,.0f} MiB for the weights{more} are needed, "
            f"{available / MIB:,.0f} MiB are available ({settings}"
            f"{', cache.kv_connector_gib' if outside else ''}"
            f"{', scheduler.encoder_cache_tokens' if encoder_cache_bytes else ''})"
        )


def expected_bytes_per_token(hf_config: Any, itemsize: int, scale_bytes: int = 0) -> int | None:
    """K and V of all layers as a configuration states them, if it uses the common fields; each head
    has a scale besides.
    """
    layers = [hf_config] * (getattr(hf_config, "num_hidden_layers", None) or 0)
    if getattr(hf_config, "is_heterogeneous", False):
        layers = list(hf_config.per_layer_config)  # some fields cannot be read from the whole
    shares = getattr(hf_config, "kv_sharing_modes", None) or [None] * len(layers)
    types = getattr(hf_config, "layer_types", None) or [None] * len(layers)
    if not len(layers) == len(shares) == len(types):
        return None
    sizes = [
        _bytes_of_layer(layer, itemsize, scale_bytes)
        for layer, share, kind in zip(layers, shares, types, strict=True)
        if share != "reuse" and kind not in _WITHOUT_KV
    ]
    known = [size for size in sizes if size is not None]
    return sum(known) if layers and len(known) == len(sizes) else None


def _bytes_of_layer(config: Any, itemsize: int, scale_bytes: int) -> int | None:
    num_heads, num_kv_heads, head_dim, hidden_size = (
        getattr(config, name, None)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    )
    if not (num_heads and (head_dim or hidden_size)):
        return None
    row_bytes = (head_dim or hidden_size // num_heads) * itemsize + scale_bytes
    return int(2 * (num_kv_heads or num_heads) * row_bytes)


def choose_num_kv_blocks(
    config: EngineConfig,
    bytes_per_token: int,
    max_model_len: int,
    num_other_bytes: int = 0,
    weight_bytes: int = 0,
) -> int:
    """Return blocks of the KV pool: the setting, else what fits into the memory meant for it, of
    which states and windows take a part.

    Unless set, never more than `max_useful_blocks`, nor than twice `weight_bytes`, 256 MiB and
    `max_model_len` tokens, whichever is most. Raises `ConfigError` if not even one block fits.
    """
    cache = config.cache
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    if not bytes_per_token:  # no layer of it keeps any: they only count tokens
        return max_useful_blocks(config, max_model_len)
    budget = max(memory_for_requests(config) - num_other_bytes, 0)
    bytes_per_block = bytes_per_token * cache.block_size
    num_blocks = budget // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"not one KV block fits: {cache.block_size} tokens need {bytes_per_block / MIB:.1f} "
            f"MiB, the pool has {budget / MIB:.1f} MiB (cache.kv_cache_gib, cache.block_size)"
        )
    if cache.kv_cache_gib is not None:
        return num_blocks
    most = -(-max(2 * weight_bytes, 256 * MIB, max_model_len * bytes_per_token) // bytes_per_block)
    return min(num_blocks, max_useful_blocks(config, max_model_len), most)


def memory_for_requests(config: EngineConfig) -> int:
    """Return bytes for what is kept of requests."""
    if config.cache.kv_cache_gib is not None:
        return int(config.cache.kv_cache_gib * GIB)
    return min(int(machine.available_memory() * DEFAULT_MEMORY_SHARE), DEFAULT_MEMORY_LIMIT)


# The types in which a model computes on this CPU, and in which its K and V are kept.


def _is_bfloat16_fast() -> bool:
    """Return whether a model that our kernels serve computes fast in bfloat16."""
    try:
        return machine.has_native_bf16() or load_kernels().is_fast
    except KernelsUnavailableError:
        return False


CPU_TYPES = SideTypes("int8", "float32", _is_bfloat16_fast)
