"""Blocks of the paged cache in host memory, copied beside the steps: a KV connector on a device.

A block is gathered into one piece on the device, and crosses from there by a queue of its own, so
that steps compute meanwhile. Knows pages, slots and queues; knows nothing about hashes or files.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.features.kv_connector import HostMemoryWorker
from aioserve.features.kv_connector.host_blocks import (
    KeptTensors,
    describe_layout,
    share_slots,
    sizes_of,
)
from aioserve.gpu.cuda.device import Device, Event, HostSlot, Moment, StagingRing
from aioserve.kv_cache import BLOCKS, KVConnectorMetadata
from aioserve.runner.interface import SlotGroup

# Of each of two buffers on the device, or one block: while one is filled, the other is copied. A
# guess: too little to be missed there, and as much as a link moves in about a millisecond.
STAGE_BYTES = 16 << 20

Pairs = Sequence[tuple[int, int]]
_Parts = Sequence[tuple[Tensor, slice]]  # bytes of a cache, and their place in a block


@dataclass(frozen=True, slots=True)
class Copied:
    """The copies between card and host memory that a step began."""

    done: Moment
    num_loads: int
    num_bytes_loaded: int
    loads_began: Moment | None


@dataclass(slots=True)
class _Stage:
    """A buffer of blocks on their way, and the step and copy that used it last."""

    memory: Tensor
    step: Event | None = None
    copy: Moment | None = None


class _Slots:
    """The slots in host memory for the blocks of one pool."""

    def __init__(self, kept: KeptTensors, noted: Tensor | None = None) -> None:
        self.name, self.weight = kept.name, kept.weight
        self.block_bytes = sum(sizes_of(kept.tensors)) + (noted is not None)
        self.num_slots = 0
        self.slots: Sequence[HostSlot] = ()
        self.parts: _Parts = []
        self.noted: Tensor | None = None
        self.attach(kept, noted)

    def attach(self, kept: KeptTensors, noted: Tensor | None) -> None:
        """Copy from and to these from now on, which are as those were that it was made for."""
        sizes = sizes_of(kept.tensors)
        assert sum(sizes) + (noted is not None) == self.block_bytes, "of the same model"
        ends = itertools.accumulate(sizes)
        self.noted = noted
        self.parts = [
            (cache.view(torch.uint8).view(len(cache), -1), slice(end - size, end))
            for cache, size, end in zip(kept.tensors, sizes, ends, strict=True)
        ]

    def pieces(self, count: int) -> list[slice]:
        """Return `count` blocks in pieces that fit into a buffer on the device."""
        size = num_staged(self.block_bytes)
        return [slice(begin, begin + size) for begin in range(0, count, size)]

    def notes(self, saves: Pairs, loads: Pairs) -> list[int]:
        """Return the noted byte of each block that is saved. Loaded blocks get theirs."""
        if self.noted is None:
            return []
        found: list[int] = self.noted[[block for block, _ in saves], 0].tolist()
        saved = dict(zip((slot for _, slot in saves), found, strict=True))
        for slot, block in loads:
            kept = saved[slot] if slot in saved else int(self.slots[slot].tensor[-1])
            self.noted[block] = kept
        return found


class DeviceBlocks(HostMemoryWorker):
    """Slots in host memory for what each pool has, as many as fit a number of bytes, which are
    taken at once.
    """

    def __init__(
        self,
        device: Device,
        kept: Sequence[KeptTensors],
        num_bytes: int,
        computed: str,
        noted: Tensor | None = None,
    ) -> None:
        """Pages of `kept` lie in one piece each; `computed` says by what. `noted`: a byte for each
        KV block, which the host has, uint8 [num_pages, 1]; it may only be given where no step is in
        flight when copies are queued. Raises `ConfigError` if there is no room for a block of each
        pool, or no such memory.
        """
        of_blocks = [own for own in kept if own.name == BLOCKS]
        if noted is not None:
            of_blocks = [own._replace(tensors=[*own.tensors, noted]) for own in of_blocks]
        others = [own for own in kept if own.name != BLOCKS]
        self.layout = describe_layout(computed, [*of_blocks, *others])
        every = [_Slots(own, noted if own.name == BLOCKS else None) for own in kept]
        self._pools = {slots.name: slots for slots in every if slots.block_bytes}
        share_slots(num_bytes, list(self._pools.values()))
        self._device = device
        self._copies = device.copy_queue()
        try:
            for own in self._pools.values():
                own.slots = self._copies.slots(own.num_slots, own.block_bytes)
        except RuntimeError as error:
            what = str(error).partition("\n")[0]
            raise ConfigError(
                f"no {num_bytes >> 20:,} MiB of host memory for a device to copy to: {what} "
                "(cache.kv_connector_gib)"
            ) from error
        kv_blocks = self._pools.get(BLOCKS)
        self.num_slots = 0 if kv_blocks is None else kv_blocks.num_slots
        self.block_bytes = 0 if kv_blocks is None else kv_blocks.block_bytes
        self._num_bytes_loaded = 0
        place = device.torch_device
        size = device_bytes(*(own.block_bytes for own in self._pools.values())) // 2
        self._stages = deque(
            _Stage(torch.empty(size, dtype=torch.uint8, device=place)) for _ in range(2)
        )
        # Saves and loads of the largest step, and what is noted of them.
        num_ids = sum(own.num_slots for own in self._pools.values())
        num_ids += sum(len(own.tensors[0]) for own in kept if own.tensors)
        self._ids = torch.empty(2 * num_ids, dtype=torch.int32, device=place)
        self._ring = StagingRing(device, 2 * num_ids)

    @property
    def groups(self) -> list[SlotGroup]:
        return [SlotGroup(own.name, own.num_slots, own.block_bytes) for own in self._pools.values()]

    @property
    def num_bytes_loaded(self) -> int:
        return self._num_bytes_loaded

    def attach(self, kept: Sequence[KeptTensors], noted: Tensor | None) -> None:
        """Copy from and to these from now on, which are as those were that it was made for."""
        for own in kept:
            if own.name in self._pools:
                self._pools[own.name].attach(own, noted if own.name == BLOCKS else None)

    def detach(self) -> None:
        """Let go of the caches, whose memory is freed."""
        for own in self._pools.values():
            own.parts, own.noted = [], None

    def memory(self, slot: int) -> memoryview:
        for own in self._pools.values():
            if slot < own.num_slots:
                return own.slots[slot].tensor.numpy().data
            slot -= own.num_slots
        raise IndexError("there are fewer slots")

    def transfer(self, metadata: KVConnectorMetadata) -> Copied:
        """Queue the copies of a step before its forward pass; the step is not back before they are
        `finish`ed.
        """
        words: list[int] = []
        copies = []
        for name, (saves, loads) in metadata.by_pool.items():
            if saves or loads:
                begin = len(words)
                words += [block for block, _ in saves] + [block for _, block in loads]
                first, end = begin + len(saves), len(words)
                own = self._pools[name]
                words += own.notes(saves, loads)
                places = slice(begin, first), slice(first, end), slice(end, len(words))
                copies.append((own, saves, loads, places))
        buffer = self._ring.take()
        buffer.array[: len(words)] = words
        staged = self._ids[: len(words)]
        self._device.stage(staged, buffer)
        self._ring.guard()
        for own, saves, _, (ids, _, notes) in copies:
            self._save(own, staged[ids], staged[notes], [slot for _, slot in saves])
        num_loads = sum(len(loads) for _, _, loads, _ in copies)
        loads_began = self._copies.record() if num_loads else None
        for own, _, loads, (_, ids, _) in copies:
            self._load(own, [slot for slot, _ in loads], staged[ids])
        num_bytes = sum(len(loads) * own.block_bytes for own, _, loads, _ in copies)
        return Copied(self._copies.record(), num_loads, num_bytes, loads_began)

    def finish(self, copied: Copied) -> None:
        """Wait for them; from any thread. Also if the step failed: slots are given to others then.
        Raises what the copies raised.
        """
        copied.done.wait()
        if copied.loads_began is not None:
            self.num_loaded += copied.num_loads
            self._num_bytes_loaded += copied.num_bytes_loaded
            self.load_seconds += copied.done.since(copied.loads_began)

    def _save(self, own: _Slots, ids: Tensor, notes: Tensor, slots: list[int]) -> None:
        """Copy blocks `ids`, with their `notes` if some are kept, to as many `slots`."""
        for some in own.pieces(len(slots)):
            stage, blocks = self._take_stage(own, len(slots[some]))
            if stage.copy is not None:
                self._copies.lead(stage.copy)
            self._device.launch(partial(_gather, own.parts, blocks, ids[some], notes[some]))
            stage.step = self._device.record()
            self._copies.follow(stage.step)
            for slot, block in zip(slots[some], blocks, strict=True):
                self._copies.save(own.slots[slot], block)
            stage.copy = self._copies.record()

    def _load(self, own: _Slots, slots: list[int], ids: Tensor) -> None:
        """Copy `slots` to as many blocks `ids`."""
        for some in own.pieces(len(slots)):
            stage, blocks = self._take_stage(own, len(slots[some]))
            if stage.step is not None:
                self._copies.follow(stage.step)
            for slot, block in zip(slots[some], blocks, strict=True):
                self._copies.load(block, own.slots[slot])
            stage.copy = self._copies.record()
            self._copies.lead(stage.copy)
            self._device.launch(partial(_scatter, own.parts, blocks, ids[some]))
            stage.step = self._device.record()

    def _take_stage(self, own: _Slots, count: int) -> tuple[_Stage, Tensor]:
        """Return the buffer that was used before the last one, and `count` blocks of it."""
        self._stages.rotate()
        stage = self._stages[0]
        return stage, stage.memory[: count * own.block_bytes].view(count, -1)


def _gather(parts: _Parts, blocks: Tensor, ids: Tensor, notes: Tensor) -> None:
    rows = ids.long()
    for cache, part in parts:
        blocks[:, part] = cache[rows]
    if len(notes):
        blocks[:, -1] = notes.to(torch.uint8)


def _scatter(parts: _Parts, blocks: Tensor, ids: Tensor) -> None:
    rows = ids.long()
    for cache, part in parts:
        cache[rows] = blocks[:, part]


def num_staged(block_bytes: int) -> int:
    """Return blocks of a buffer on the device."""
    return max(1, STAGE_BYTES // block_bytes)


def device_bytes(*block_bytes: int) -> int:
    """Return what a connector takes on the device for blocks of these sizes, each of a pool."""
    return 2 * max((num_staged(size) * size for size in block_bytes if size), default=0)
