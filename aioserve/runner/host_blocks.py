"""Blocks of the paged cache in host memory: the runner's side of a KV connector.

Copies whole blocks of all layers between the caches and slots. Knows tensors and bytes; knows
nothing about hashes, requests or files.
"""

import itertools
import mmap
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.kv_cache import KVConnectorMetadata
from aioserve.kv_connector import HostMemoryWorker

if TYPE_CHECKING:
    from aioserve.runner.tensor_parallel.group import Ranks

# No other process is to see it; where there is no such flag, mmap is private anyway.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}


class SharedSlots(NamedTuple):
    """Slots of several ranks: of a block each has its own heads there, one behind the other."""

    file: int  # without a name, which all of them have open
    ranks: "Ranks"


class HostBlocks(HostMemoryWorker):
    """Slots for blocks in host memory, as many as fit a number of bytes: address space at once,
    memory as they fill.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        num_bytes: int,
        computed: str,
        shared: SharedSlots | None = None,
    ) -> None:
        """`caches` are K and V of every layer, [num_blocks, ...], each block in one piece;
        `computed` says by what; `num_bytes` are those of all ranks. Raises `ConfigError` if there
        is no room for a single block.
        """
        own_bytes, self.layout = sum(sizes_of(caches)), describe_layout(computed, caches)
        self._ranks, rank, count = None, 0, 1
        if shared is not None:
            self._ranks, rank, count = shared.ranks, shared.ranks.rank, shared.ranks.size
            self.layout += f"; {count} ranks"
        self.block_bytes = own_bytes * count
        self._own = slice(rank * own_bytes, (rank + 1) * own_bytes)  # of the bytes of a slot
        self.num_slots = count_slots(num_bytes, self.block_bytes)
        try:
            self._memory = _map(self.num_slots * self.block_bytes, shared)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the system does not give {num_bytes >> 20:,} MiB for KV blocks: {error} "
                "(cache.kv_connector_gib)"
            ) from error
        self._pairs: list[tuple[Any, Any]] = []
        self.attach(caches)

    def attach(self, caches: Sequence[Tensor]) -> None:
        """From now on copy between the slots and `caches`, whose blocks have the same sizes."""
        sizes = sizes_of(caches)
        memory = np.frombuffer(self._memory, np.uint8)
        slots = memory.reshape(self.num_slots, self.block_bytes)[:, self._own]
        # numpy, on one thread: torch would wake its threads for each of these small copies.
        self._pairs = [
            (cache.view(torch.uint8).view(len(cache), -1).numpy(), slots[:, end - size : end])
            for cache, size, end in zip(caches, sizes, itertools.accumulate(sizes), strict=True)
        ]

    def transfer(self, metadata: KVConnectorMetadata) -> None:
        """Copy blocks, before the forward pass of their step."""
        if metadata.saves:
            block_ids, slots = np.array(metadata.saves).T
            for cache, of_slots in self._pairs:
                of_slots[slots] = cache[block_ids]
        if metadata.loads:
            began = time.perf_counter()
            slots, block_ids = np.array(metadata.loads).T
            for cache, of_slots in self._pairs:
                cache[block_ids] = of_slots[slots]
            self.load_seconds += time.perf_counter() - began
            self.num_loaded += len(slots)
        if self._ranks is not None:  # once the step is back, all of them have done it
            self._ranks.least(0)

    def close(self) -> None:
        """Let go of the caches. What is in the slots can still be read."""
        self._pairs = []

    def memory(self, slot: int) -> memoryview:
        begin = slot * self.block_bytes
        return memoryview(self._memory)[begin : begin + self.block_bytes]


def _map(num_bytes: int, shared: SharedSlots | None) -> mmap.mmap:
    if shared is None:
        return mmap.mmap(-1, num_bytes, **_PRIVATE)
    os.ftruncate(shared.file, num_bytes)
    return mmap.mmap(shared.file, num_bytes)


def sizes_of(caches: Sequence[Tensor]) -> list[int]:
    """Bytes of a block in each."""
    return [cache[0].numel() * cache.dtype.itemsize for cache in caches]


def count_slots(num_bytes: int, block_bytes: int) -> int:
    """How many blocks fit. Raises `ConfigError` if none does."""
    if num_bytes < block_bytes:
        raise ConfigError(
            f"cache.kv_connector_gib is {num_bytes:,} bytes, but a block of the KV cache has "
            f"{block_bytes:,}"
        )
    return num_bytes // block_bytes


def describe_layout(computed: str, caches: Sequence[Tensor]) -> str:
    """The text by which caches are compared: `computed`, the dtype, and the shapes of a block."""
    shapes = [tuple(cache.shape[1:]) for cache in caches]
    return f"{computed}; {caches[0].dtype}; {shapes}"
