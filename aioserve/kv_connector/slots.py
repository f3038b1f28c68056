"""Slots of host memory for the contents of one pool: which is where, and what steps copy.

Knows hashes, slots and steps. Knows no requests, and nothing about what is in a block.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from aioserve.kv_cache import BLOCKS, BlockNotes, BlockPool, Copies, KeptPool, Outside
from aioserve.kv_connector.interface import SlotGroup


class Transfers:
    """The blocks that one step copies to and from host memory."""

    def __init__(self) -> None:
        self.saves: dict[bytes, tuple[int, int]] = {}  # by content: block id, slot
        self.loads: list[tuple[int, int]] = []  # slot, block id


class PoolSlots(Outside):
    """What host memory has of one pool. A slot is held, by its count in `slots`, while a step in
    flight or a store may touch it, and while it waits for a request; all others may be evicted.
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
        """Whether the pool has it, or a slot."""
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
        """What the step of that id copies, which is planned; None: nothing."""
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
        """The transfers of steps up to that one, which are back; to be released."""
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
