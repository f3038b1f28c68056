"""What the caches hold in host memory: the runner's side of a KV connector.

Copies whole blocks of all layers between the caches and slots, and states as well. Knows tensors
and bytes; knows nothing about hashes, requests or files.
"""

import itertools
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.features.kv_connector import HostMemoryWorker, SlotGroup
from aioserve.kv_cache import BLOCKS, KVConnectorMetadata

if TYPE_CHECKING:
    from aioserve.runner.ranks import Ranks

# No other process is to see it; where there is no such flag, mmap is private anyway.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}


class KeptTensors(NamedTuple):
    """The tensors that belong to the blocks of one pool, or to its slots for states."""

    name: str  # of the pool
    tensors: Sequence[Tensor]  # [num_blocks, ...], each block in one piece
    weight: int  # how many of its blocks are kept where other pools keep as many as theirs say
    of_first: Sequence[Tensor] = ()  # the same, of the first of several ranks alone
    commit: Callable[[int], object] | None = None  # has the first blocks in memory, before a write

    @property
    def num_bytes_of_first(self) -> int:
        """Bytes of a block that the first rank alone has."""
        return sum(sizes_of(self.of_first))


class PoolShare(Protocol):
    """The part of the host memory that the blocks of one pool get."""

    weight: int  # as in `KeptTensors`
    block_bytes: int
    num_slots: int


class SharedSlots(NamedTuple):
    """Slots of several ranks: of a block each has its own heads there, one behind the other."""

    file: int  # without a name, which all of them have open
    ranks: "Ranks"
    of_first: Mapping[str, int] = {}  # bytes of a block that the first rank has beside these


class _Slots:
    """The slots in host memory for the blocks of one pool."""

    def __init__(self, kept: KeptTensors, shared: SharedSlots | None) -> None:
        self.name, self.weight = kept.name, kept.weight
        own, rank, count, of_first = sum(sizes_of(kept.tensors)), 0, 1, kept.num_bytes_of_first
        if shared is not None:
            rank, count = shared.ranks.rank, shared.ranks.size
            of_first = shared.of_first.get(kept.name, of_first)
        self.block_bytes = own * count + of_first
        self.num_slots = 0
        self._own = slice(rank * own, (rank + 1) * own)  # of the bytes of a slot
        self._of_first = slice(own * count, self.block_bytes if rank == 0 else own * count)
        self._commit: Callable[[int], object] | None = None
        self._pairs: list[tuple[Any, Any]] = []

    def attach(self, kept: KeptTensors, memory: Any) -> None:
        """From now on copy between these tensors and the slots, which are bytes of `memory`."""
        slots = memory.reshape(self.num_slots, self.block_bytes)
        self._commit, self._pairs = kept.commit, []
        # numpy, on one thread: torch would wake its threads for each of these small copies.
        for tensors, place in ((kept.tensors, self._own), (kept.of_first, self._of_first)):
            if place.start == place.stop:
                continue
            own, sizes = slots[:, place], sizes_of(tensors)
            ends = itertools.accumulate(sizes)
            self._pairs += [
                (x.view(torch.uint8).view(len(x), -1).numpy(), own[:, end - size : end])
                for x, size, end in zip(tensors, sizes, ends, strict=True)
            ]

    def detach(self) -> None:
        self._pairs, self._commit = [], None

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        block_ids, slots = np.array(pairs).T
        for cache, of_slots in self._pairs:
            of_slots[slots] = cache[block_ids]

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        slots, block_ids = np.array(pairs).T
        if self._commit is not None:
            self._commit(int(block_ids.max()) + 1)
        for cache, of_slots in self._pairs:
            cache[block_ids] = of_slots[slots]


class HostBlocks(HostMemoryWorker):
    """Slots in host memory for what each pool has, as many as fit a number of bytes: address space
    at once, memory as they fill.
    """

    def __init__(
        self,
        kept: Sequence[KeptTensors],
        num_bytes: int,
        computed: str,
        shared: SharedSlots | None = None,
    ) -> None:
        """`computed` says by what; `num_bytes` are those of all ranks. Raises `ConfigError` if
        there is no room for a block of each pool.
        """
        self._ranks = None if shared is None else shared.ranks
        self.layout = describe_layout(computed, kept)
        if shared is not None:
            self.layout += f"; {shared.ranks.size} ranks"
        every = {own.name: _Slots(own, shared) for own in kept}
        self._pools = {name: slots for name, slots in every.items() if slots.block_bytes}
        share_slots(num_bytes, list(self._pools.values()))
        sizes = [slots.num_slots * slots.block_bytes for slots in self._pools.values()]
        self._ends = list(itertools.accumulate(sizes))  # of each pool's bytes
        try:
            self._memory = _map(self._ends[-1], shared)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the system does not give {num_bytes >> 20:,} MiB for KV blocks: {error} "
                "(cache.kv_connector_gib)"
            ) from error
        of_blocks = self._pools.get(BLOCKS)
        self.num_slots = 0 if of_blocks is None else of_blocks.num_slots
        self.block_bytes = 0 if of_blocks is None else of_blocks.block_bytes
        self._num_bytes_loaded = 0
        self.attach(kept)

    @property
    def groups(self) -> list[SlotGroup]:
        return [
            SlotGroup(name, slots.num_slots, slots.block_bytes)
            for name, slots in self._pools.items()
        ]

    @property
    def num_bytes_loaded(self) -> int:
        return self._num_bytes_loaded

    def attach(self, kept: Sequence[KeptTensors]) -> None:
        """From now on copy between the slots and `kept`, whose blocks have the same sizes."""
        memory, own = np.frombuffer(self._memory, np.uint8), {pool.name: pool for pool in kept}
        for (name, slots), end in zip(self._pools.items(), self._ends, strict=True):
            begin = end - slots.num_slots * slots.block_bytes
            slots.attach(own[name], memory[begin:end])

    def transfer(self, metadata: KVConnectorMetadata) -> None:
        """Copy blocks, before the forward pass of their step."""
        copies = metadata.by_pool
        for name, (saves, _) in copies.items():
            if saves:
                self._pools[name].save(saves)
        began = time.perf_counter()
        for name, (_, loads) in copies.items():
            if loads:
                self._pools[name].load(loads)
                self.num_loaded += len(loads)
                self._num_bytes_loaded += len(loads) * self._pools[name].block_bytes
        if any(loads for _, loads in copies.values()):
            self.load_seconds += time.perf_counter() - began
        if self._ranks is not None:  # once the step is back, all of them have done it
            self._ranks.least(0)

    def close(self) -> None:
        """Let go of the caches. What is in the slots can still be read."""
        for slots in self._pools.values():
            slots.detach()

    def memory(self, slot: int) -> memoryview:
        for slots, end in zip(self._pools.values(), self._ends, strict=True):
            if slot < slots.num_slots:
                begin = end - (slots.num_slots - slot) * slots.block_bytes
                return memoryview(self._memory)[begin : begin + slots.block_bytes]
            slot -= slots.num_slots
        raise IndexError("there are fewer slots")


def share_slots(num_bytes: int, pools: Sequence[PoolShare]) -> None:
    """Give each pool its slots: one at least, and of what is left its share by weight. Raises
    `ConfigError` if not even that fits.
    """
    least = sum(pool.block_bytes for pool in pools)
    count_slots(num_bytes, least)
    in_all = sum(pool.weight * pool.block_bytes for pool in pools)
    for pool in pools:
        pool.num_slots = 1 + (num_bytes - least) * pool.weight // in_all


def _map(num_bytes: int, shared: SharedSlots | None) -> mmap.mmap:
    if shared is None:
        return mmap.mmap(-1, num_bytes, **_PRIVATE)
    os.ftruncate(shared.file, num_bytes)
    return mmap.mmap(shared.file, num_bytes)


def sizes_of(caches: Sequence[Tensor]) -> list[int]:
    """Return bytes of a block in each."""
    return [cache[0].numel() * cache.dtype.itemsize for cache in caches]


def count_slots(num_bytes: int, block_bytes: int) -> int:
    """Return how many blocks fit. Raises `ConfigError` if none does."""
    if num_bytes < block_bytes:
        raise ConfigError(
            f"cache.kv_connector_gib is {num_bytes:,} bytes, but a block of the KV cache has "
            f"{block_bytes:,}"
        )
    return num_bytes // block_bytes


def describe_layout(computed: str, kept: Sequence[KeptTensors]) -> str:
    """Return the text by which caches are compared: `computed`, and of each pool the types and
    shapes of a block.
    """
    found = [computed]
    for pool in kept:
        tensors = (*pool.tensors, *pool.of_first)
        found.append(f"{pool.name}: {[(str(x.dtype), tuple(x.shape[1:])) for x in tensors]}")
    return "; ".join(found)
