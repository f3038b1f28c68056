"""Slots of host memory for the contents of pools: which content is where, and what steps copy.

`PoolSlots` are those of one pool; `KeptPools` knows of all of them how far a request can begin
behind its blocks. Knows hashes, slots, steps, and which of a request's blocks are in a pool. Knows
nothing about what is in a block.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from aioserve.kv_cache import (
    BLOCKS,
    BlockNotes,
    BlockPool,
    Copies,
    KeptPool,
    Outside,
    reached_blocks,
)
from aioserve.request import Request
from aioserve.runner.interface import SlotGroup


class Transfers:
    """The blocks that one step copies to and from host memory."""

    def __init__(self) -> None:
        self.saves: dict[bytes, tuple[int, int]] = {}  # by content: block id, slot
        self.loads: list[tuple[int, int]] = []  # slot, block id


class PoolSlots(Outside):
    """The slots of host memory for one pool. A slot is held, by its count in `slots`, while a step
    in flight or a store may touch it, and while it waits for a request; all others may be evicted.
    """

    def __init__(
        self, group: SlotGroup, first_slot: int, notes: BlockNotes, *, is_loaded: bool
    ) -> None:
        """`first_slot`: what a store calls the first of them. Nothing is loaded unless it
        `is_loaded`.
        """
        self.name, self.block_bytes = group.name, group.block_bytes
        self.slots = BlockPool(group.num_slots)
        self.first_slot, self.notes = first_slot, notes
        self.pool: KeptPool | None = None  # once it has joined
        self.num_saved = self.num_unsaved = 0  # blocks copied out of the pool; without room
        self._suffix = b"" if group.name == BLOCKS else group.name.encode()
        self._is_loaded = is_loaded
        self.open = Transfers()  # of the step that is being planned
        self._planned: deque[tuple[int, Transfers]] = deque()  # not back yet

    def key(self, block_hash: bytes) -> bytes:
        """By what a store knows the content."""
        return block_hash + self._suffix

    # What a pool asks.

    def has(self, block_hash: bytes) -> bool:
        return self._is_loaded and self.slots.lookup(block_hash) is not None

    def load(self, block_hash: bytes, place: int) -> None:
        slot = self.slots.lookup(block_hash)
        assert slot is not None, "matched in this step"
        self.slots.touch([slot])
        self.open.loads.append((slot, place))

    def is_there(self, block_hash: bytes) -> bool:
        """Return whether the pool has it, or a slot."""
        pool = self.pool
        return self.has(block_hash) or (pool is not None and pool.lookup(block_hash) is not None)

    # Saves.

    def save(self, contents: dict[bytes, int]) -> None:
        """Have blocks copied in this step, as far as there is room for those that are new."""
        for block_hash, block_id in contents.items():
            slot = self.slots.lookup(block_hash)
            if slot is not None:
                self.slots.touch([slot])  # the last to be evicted
                self.slots.free([slot])
            elif not self.slots.num_free_blocks:
                self.num_unsaved += 1
            else:
                (slot,) = self.slots.allocate(1)
                self.slots.register([slot], [block_hash])
                self.open.saves[block_hash] = block_id, slot
                self.num_saved += 1

    def save_stored(self) -> None:
        """Have what became findable until now copied in this step."""
        if stored := self.notes.stored:
            self.save(stored)
            stored.clear()

    def hold(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Slots with these contents, held from now on; those of which the pool alone has one are
        saved in this step, as far as there is room.
        """
        pool, lookup = self.pool, self.slots.lookup
        self.slots.touch(slot for h in block_hashes if (slot := lookup(h)) is not None)
        missing = [h for h in block_hashes if lookup(h) is None]
        found = ((h, None if pool is None else pool.lookup(h)) for h in missing)
        self.save({h: place for h, place in found if place is not None})
        self.slots.touch(self.open.saves[h][1] for h in missing if h in self.open.saves)
        return [slot for h in block_hashes if (slot := lookup(h)) is not None]

    # Steps.

    def plan(self, step_id: int) -> Copies | None:
        """Return what the step of that id copies, which is planned; None: nothing."""
        if evicted := self.notes.evicted:
            self.save(evicted)
            evicted.clear()
        step = self.open
        if not (step.saves or step.loads):
            return None
        self.open = Transfers()
        self._planned.append((step_id, step))
        return list(step.saves.values()), step.loads.copy()

    def settle(self, step_id: int) -> Iterator[Transfers]:
        """Yield the transfers of steps up to that one, which are back; to be released."""
        while self._planned and self._planned[0][0] <= step_id:
            yield self._planned.popleft()[1]

    def release(self, step: Transfers) -> None:
        """Hold the slots of a step no longer."""
        self.slots.free(slot for _, slot in step.saves.values())
        self.slots.free(slot for slot, _ in step.loads)

    def discard(self, last_step_id: int) -> None:
        """No step after that one is run."""
        discarded, self.open = [self.open], Transfers()
        while self._planned and self._planned[-1][0] > last_step_id:
            discarded.append(self._planned.pop()[1])
        self._forget(discarded)
        for step in discarded:
            self.release(step)

    def forget_unsettled(self) -> None:
        """Nothing counts that steps which are not back save or load."""
        self.notes.clear()
        self._forget([self.open, *(step for _, step in self._planned)])

    def _forget(self, steps: Iterable[Transfers]) -> None:
        for step in steps:
            for _, slot in step.saves.values():
                self.slots.unregister(slot)
            if self.pool is not None:
                self.pool.forget_blocks([place for _, place in step.loads])


#: Contents of one pool, by their hashes.
Contents = tuple[PoolSlots, list[bytes]]


class KeptPools:
    """Slots for each pool. KV blocks have to be there from the first on: in their pool, and behind
    those in host memory. What other pools need for that is in either place.
    """

    def __init__(
        self, groups: Sequence[SlotGroup], *, has_store: bool, saves: bool, loads: bool
    ) -> None:
        """With a store all that is computed is saved, without one what pools evict; if not `saves`,
        nothing is.
        """
        self._has_store, self._saves, self._loads = has_store, saves, loads
        self._kept: dict[str, PoolSlots] = {}  # by the name of the pool
        for group in groups:
            self._make(group)
        #: A model without attention has nothing in its KV blocks: they are as good as there.
        self.has_blocks = BLOCKS in self._kept
        self.blocks = self._kept.get(BLOCKS) or self._make(SlotGroup(BLOCKS, 0, 0))
        self.others: list[tuple[PoolSlots, KeptPool]] = []  # that have joined

    def __iter__(self) -> Iterator[PoolSlots]:
        return iter(self._kept.values())

    def join(self, pool: KeptPool) -> Outside:
        """Return a pool that requests need: that of the KV blocks, or another one."""
        kept = self._kept.get(pool.name) or self._make(SlotGroup(pool.name, 0, 0))
        kept.pool = pool
        if kept is not self.blocks:
            self.others.append((kept, pool))
        return kept

    def _make(self, group: SlotGroup) -> PoolSlots:
        """Slots behind those that are there; of none nothing is kept."""
        saves, first = self._saves and group.num_slots > 0, sum(k.slots.num_blocks for k in self)
        notes = BlockNotes(stored=saves and self._has_store, evicted=saves and not self._has_store)
        made = self._kept[group.name] = PoolSlots(group, first, notes, is_loaded=self._loads)
        return made

    def end_in_pool(self, hashes: Sequence[bytes], first: int) -> int:
        """Behind the last KV block that the pool has, from block `first` on without a gap: more
        than requests begin behind, where the state at the end is missing.
        """
        pool = self.blocks.pool
        if self.others and pool is not None:
            while first < len(hashes) and pool.lookup(hashes[first]) is not None:
                first += 1
        return first

    def end_in_slots(self, hashes: Sequence[bytes], first: int) -> int:
        """Behind the last KV block in host memory, from block `first` on without a gap."""
        if self.has_blocks:
            lookup = self.blocks.slots.lookup
            for i in range(first, len(hashes)):
                if lookup(hashes[i]) is None:
                    return i
        return max(first, len(hashes))

    def reached(
        self, request: Request, num_blocks: int, keys: Collection[bytes] = frozenset()
    ) -> int:
        """Behind how many of its first `num_blocks` blocks a request can begin by what pools beside
        that of the KV blocks have, or host memory, or a store that has `keys`.
        """
        before = -1
        while num_blocks != before:
            before = num_blocks
            for kept, pool in self.others:

                def is_there(block_hash: bytes, kept: PoolSlots = kept) -> bool:
                    return kept.is_there(block_hash) or kept.key(block_hash) in keys

                hashes = request.block_hashes
                num_blocks = reached_blocks(hashes, num_blocks, pool.needed, is_there)
        return num_blocks

    def needed(self, request: Request, num_blocks: int) -> list[Contents]:
        """Return what has to be there to begin behind the first `num_blocks` blocks: KV blocks
        first.
        """
        hashes = request.block_hashes
        found = [(self.blocks, hashes[:num_blocks])] if self.has_blocks else []
        others = ((kept, pool.needed(num_blocks)) for kept, pool in self.others)
        return [*found, *((kept, hashes[seen.start : seen.stop]) for kept, seen in others)]

    def num_bytes_to_load(self, request: Request, first: int, end: int) -> int:
        """Return bytes that are loaded to begin behind the first `end` blocks, if the pool has the
        KV blocks before `first`.
        """
        num_bytes = (end - first) * self.blocks.block_bytes
        for kept, hashes in self.needed(request, end):
            if kept is not self.blocks and (pool := kept.pool) is not None:
                num_bytes += kept.block_bytes * sum(pool.lookup(h) is None for h in hashes)
        return num_bytes

    def missing(self, request: Request, first: int, end: int) -> list[Contents]:
        """Return what is neither in a pool nor in host memory of that; KV blocks are, before
        `first`. States and windows come first, as the rest is of no use without them.
        """
        wanted = []
        for kept, hashes in reversed(self.needed(request, end)):
            if kept is self.blocks:
                lacking = hashes[first:]
            else:
                lacking = [block_hash for block_hash in hashes if not kept.is_there(block_hash)]
            if lacking:
                wanted.append((kept, lacking))
        return wanted

    def to_find(self, request: Request, begin: int, end: int) -> list[bytes]:
        """By which keys a store may have what a request needs beside KV blocks to begin behind more
        than `begin` of its first `end` blocks.
        """
        hashes = request.block_hashes
        return [
            kept.key(hashes[i])
            for kept, pool in self.others
            for i in range(pool.needed(begin + 1).start, end)
            if not kept.is_there(hashes[i])
        ]
