"""Blocks of the paged cache in host memory, copied beside the steps: a KV connector on a device.

A block is gathered into one piece on the device, and crosses from there by a queue of its own, so
that steps compute meanwhile. Knows pages, slots and queues; knows nothing about hashes or files.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.features.kv_connector import HostMemoryWorker
from aioserve.features.kv_connector.host_blocks import (
    KeptTensors,
    count_slots,
    describe_layout,
    sizes_of,
)
from aioserve.gpu.cuda.device import Device, Event, Moment, StagingRing
from aioserve.kv_cache import BLOCKS, KVConnectorMetadata

# Of each of two buffers on the device, or one block: while one is filled, the other is copied. A
# guess: too little to be missed there, and as much as a link moves in about a millisecond.
STAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Copied:
    """The copies between card and host memory that a step began."""

    done: Moment
    num_loads: int
    loads_began: Moment | None


@dataclass(slots=True)
class _Stage:
    """A buffer of blocks on their way, [blocks, bytes], and the step and copy that used it last."""

    blocks: Tensor
    step: Event | None = None
    copy: Moment | None = None


class DeviceBlocks(HostMemoryWorker):
    """Slots in host memory, as many as fit a number of bytes, which are taken at once."""

    def __init__(
        self,
        device: Device,
        caches: Sequence[Tensor],
        num_bytes: int,
        computed: str,
        noted: Tensor | None = None,
    ) -> None:
        """`caches` are K and V of every layer, [num_pages, ...], each page in one piece; `computed`
        says by what. `noted`: a byte for each block, which the host has, uint8 [num_pages, 1]; it
        may only be given where no step is in flight when copies are queued. Raises `ConfigError` if
        there is no room for a block, or no such memory.
        """
        parts = caches if noted is None else [*caches, noted]
        self.block_bytes = sum(sizes_of(parts))
        self.num_slots = count_slots(num_bytes, self.block_bytes)
        self.layout = describe_layout(computed, [KeptTensors(BLOCKS, parts, 1)])
        self._device = device
        self._copies = device.copy_queue()
        try:
            self._slots = self._copies.slots(self.num_slots, self.block_bytes)
        except RuntimeError as error:
            what = str(error).partition("\n")[0]
            raise ConfigError(
                f"no {num_bytes >> 20:,} MiB of host memory for a device to copy to: {what} "
                "(cache.kv_connector_gib)"
            ) from error
        self._num_staged = num_staged(self.block_bytes)
        place = device.torch_device
        shape = (self._num_staged, self.block_bytes)
        self._stages = deque(
            _Stage(torch.empty(shape, dtype=torch.uint8, device=place)) for _ in range(2)
        )
        self._parts: list[tuple[Tensor, slice]] = []
        self.attach(caches, noted)
        num_ids = self.num_slots + len(caches[0])  # saves and loads of the largest step
        self._ids = torch.empty(2, num_ids, dtype=torch.int32, device=place)  # and what is noted
        self._ring = StagingRing(device, 2 * num_ids)

    def attach(self, caches: Sequence[Tensor], noted: Tensor | None) -> None:
        """Copy from and to these from now on, which are as those were that it was made for."""
        sizes = sizes_of(caches)
        self._noted = noted
        assert sum(sizes) + (noted is not None) == self.block_bytes, "of the same model"
        self._parts = [
            (cache.view(torch.uint8).view(len(cache), -1), slice(end - size, end))
            for cache, size, end in zip(caches, sizes, itertools.accumulate(sizes), strict=True)
        ]

    def detach(self) -> None:
        """Let go of the caches, whose memory is freed."""
        self._parts, self._noted = [], None

    def memory(self, slot: int) -> memoryview:
        return self._slots[slot].tensor.numpy().data

    def transfer(self, metadata: KVConnectorMetadata) -> Copied:
        """Queue the copies of a step before its forward pass; the step is not back before they are
        `finish`ed.
        """
        saves, loads = metadata.saves, metadata.loads
        block_ids = [block for block, _ in saves] + [block for _, block in loads]
        count = len(block_ids)
        buffer = self._ring.take()
        buffer.array[:count] = block_ids
        if self._noted is not None:
            notes_of = self._noted[block_ids, 0].numpy()
            buffer.array[count : 2 * count] = notes_of
            saved = dict(zip((slot for _, slot in saves), notes_of.tolist(), strict=False))
            for slot, block in loads:
                kept = saved[slot] if slot in saved else int(self._slots[slot].tensor[-1])
                self._noted[block] = kept
        staged = self._ids.view(-1)[: 2 * count]
        self._device.stage(staged, buffer)
        self._ring.guard()
        ids, notes = staged.view(2, count)
        for begin in range(0, len(saves), self._num_staged):
            pairs = saves[begin : begin + self._num_staged]
            part = slice(begin, begin + len(pairs))
            self._save(ids[part], notes[part], [slot for _, slot in pairs])
        loads_began = self._copies.record() if loads else None
        for begin in range(0, len(loads), self._num_staged):
            pairs = loads[begin : begin + self._num_staged]
            first = len(saves) + begin
            self._load([slot for slot, _ in pairs], ids[first : first + len(pairs)])
        return Copied(self._copies.record(), len(loads), loads_began)

    def finish(self, copied: Copied) -> None:
        """Wait for them; from any thread. Also if the step failed: slots are given to others then.
        Raises what the copies raised.
        """
        copied.done.wait()
        if copied.loads_began is not None:
            self.num_loaded += copied.num_loads
            self.load_seconds += copied.done.since(copied.loads_began)

    def _save(self, ids: Tensor, notes: Tensor, slots: list[int]) -> None:
        stage = self._take_stage()
        blocks, parts, has_notes = stage.blocks[: len(slots)], self._parts, self._noted is not None

        def gather() -> None:
            rows = ids.long()
            for cache, part in parts:
                blocks[:, part] = cache[rows]
            if has_notes:
                blocks[:, -1] = notes.to(torch.uint8)

        if stage.copy is not None:
            self._copies.lead(stage.copy)
        self._device.launch(gather)
        stage.step = self._device.record()
        self._copies.follow(stage.step)
        for slot, block in zip(slots, blocks, strict=True):
            self._copies.save(self._slots[slot], block)
        stage.copy = self._copies.record()

    def _load(self, slots: list[int], ids: Tensor) -> None:
        stage = self._take_stage()
        blocks, parts = stage.blocks[: len(slots)], self._parts

        def scatter() -> None:
            rows = ids.long()
            for cache, part in parts:
                cache[rows] = blocks[:, part]

        if stage.step is not None:
            self._copies.follow(stage.step)
        for slot, block in zip(slots, blocks, strict=True):
            self._copies.load(block, self._slots[slot])
        stage.copy = self._copies.record()
        self._copies.lead(stage.copy)
        self._device.launch(scatter)
        stage.step = self._device.record()

    def _take_stage(self) -> _Stage:
        """Return the one that was used before the last."""
        self._stages.rotate()
        return self._stages[0]


def num_staged(block_bytes: int) -> int:
    """Return blocks of a buffer on the device."""
    return max(1, STAGE_BYTES // block_bytes)


def device_bytes(block_bytes: int) -> int:
    """Return what a connector takes on the device."""
    return 2 * num_staged(block_bytes) * block_bytes
