"""Slots for states: what a model remembers of a whole text in a fixed size, beside keys and values.

State-space, linear-attention and convolution layers have such states. Knows slots, positions and
the hashes of blocks; does not know what is in a state, nor which request deserves one.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from aioserve.errors import InvariantError
from aioserve.kv_cache.block_pool import BlockNotes, hash_blocks
from aioserve.kv_cache.connector import KVConnectorBase, Outside, reached_blocks
from aioserve.kv_cache.resource import StatePool, StateSlots
from aioserve.request import Request, WaitReason


@dataclass(slots=True)
class _Held:
    """The slots that a running request has."""

    slot: int
    source: int
    permanent: tuple[int, int]  # positions of snapshots that its later ones do not replace
    is_new: bool = True  # the runner has not heard of it
    latest: bytes = b""  # its newest snapshot of the other kind


class StateSlotPool(StatePool):
    """One slot for each running request, and snapshots at block boundaries in all that are left.

    A snapshot is found by the hash of the block that ends there. One is made where a prompt leaves
    a prefix that others have left behind, at the end of its last whole block, and where a step
    happens to end at a boundary; of the last kind each request has its newest. The least recently
    used go first. No snapshot keeps a request from getting a slot.
    """

    plans_decodes = True

    def __init__(self, num_slots: int, block_size: int, *, keeps_snapshots: bool = True) -> None:
        super().__init__(num_slots)
        self._block_size = block_size
        self._keeps_snapshots = keeps_snapshots
        self._unused = list(range(num_slots - 1, -1, -1))
        self._held: dict[Request, _Held] = {}
        self._snapshots: dict[bytes, int] = {}  # by hash: the slot; least recently used first
        #: Slots of snapshots that the step under construction begins with.
        self._busy: set[int] = set()
        self._outside: Outside | None = None  # what a KV connector has of snapshots
        self._notes = BlockNotes()  # which snapshots it is to keep

    # For a KV connector.

    def join(self, connector: KVConnectorBase) -> None:
        if (outside := connector.join(self)) is not None:
            self._outside, self._notes = outside, outside.notes

    def lookup(self, block_hash: bytes) -> int | None:
        """The slot of the snapshot at the end of this block; None if there is none."""
        return self._snapshots.get(block_hash)

    def needed(self, num_blocks: int) -> range:
        """A text goes on behind `num_blocks` blocks with the state at the end of the last."""
        return range(max(num_blocks - 1, 0), num_blocks)

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """States are loaded into the slots of their requests, where no other finds them."""

    def _is_there(self, block_hash: bytes) -> bool:
        outside = self._outside
        return block_hash in self._snapshots or (outside is not None and outside.has(block_hash))

    # For requests.

    @property
    def num_free_slots(self) -> int:
        """State slots that requests can get, unused or taken from snapshots."""
        num_busy = sum(slot in self._busy for slot in self._snapshots.values())
        return len(self._unused) + len(self._snapshots) - num_busy

    @property
    def num_snapshots(self) -> int:
        """Number of cached state snapshots."""
        return len(self._snapshots)

    def num_reached_blocks(self, request: Request, num_blocks: int) -> int:
        """Behind how many of the request's first `num_blocks` blocks its state is known, at most.
        Their hashes must be. Changes nothing.
        """
        return reached_blocks(request.block_hashes, num_blocks, self.needed, self._is_there)

    def shortage(self, request: Request, gone: Collection[Request] = ()) -> WaitReason | None:
        is_free = self.num_free_slots or any(r in self._held for r in (*gone, request))
        return None if is_free else WaitReason.STATES

    def held(self) -> str:
        num = self.num_slots - self.num_free_slots
        return f"{num} slots for states" if num else ""

    def touch(self, request: Request, num_blocks: int) -> None:
        """Make the snapshot behind the first `num_blocks` blocks, if there is one, the last to be
        evicted.
        """
        if num_blocks:
            self._touch(request.block_hashes[num_blocks - 1])

    def _touch(self, block_hash: bytes) -> None:
        if (slot := self._snapshots.pop(block_hash, None)) is not None:
            self._snapshots[block_hash] = slot

    def take(self, request: Request, num_blocks: int, num_shared_tokens: int) -> None:
        """A slot for a request that begins behind its computed tokens, where a snapshot is, in a
        slot or outside; `num_free_slots` must not be 0. `num_shared_tokens` of its tokens are in
        cached blocks.
        """
        size = self._block_size
        source, block_hash = -1, b""
        if begin := request.num_computed_tokens // size:  # those that are loaded included
            block_hash = request.block_hashes[begin - 1]
            self._touch(block_hash)
            source = self._snapshots.get(block_hash, -1)
        was_busy = source in self._busy
        self._busy.add(source)
        slot = self._allocate()
        if slot is None:  # the snapshot itself was the last that is free: it goes on in its place
            if source < 0 or was_busy:
                raise InvariantError(f"{request!r} is admitted, but no slot for its state is free")
            slot = self._evict(block_hash)
        if begin and source < 0:
            if self._outside is None:
                raise InvariantError(f"{request!r} is admitted, but its state is nowhere")
            self._outside.load(block_hash, slot)
            source = slot
        last = (request.num_prompt_tokens - 1) // size * size
        self._held[request] = _Held(slot, source, (num_shared_tokens, last))

    def give_back(self, request: Request) -> None:
        """The request's slot, if it has one. What it left in snapshots stays."""
        if (held := self._held.pop(request, None)) is not None:
            self._unused.append(held.slot)
            if (slot := self._snapshots.get(held.latest)) is not None:
                self._note_stored(held.latest, slot)  # no later one takes its place

    def pause(self, request: Request) -> None:
        """The state stays in its slot; the runner is told of it anew."""
        held = self._held[request]
        if held.is_new and held.source not in (-1, held.slot):
            # It has not run since it was admitted: the snapshot that it begins with is its own now.
            found = (h for h, slot in self._snapshots.items() if slot == held.source)
            if (block_hash := next(found, None)) is None:
                raise InvariantError(f"the snapshot that {request!r} begins with is gone")
            self._unused.append(held.slot)
            held.slot = self._evict(block_hash)
        held.source, held.is_new = held.slot, True

    def plan(self, tokens: dict[Request, int], step_id: int) -> dict[str, StateSlots]:
        """Return what the runner must be told of a step that computes `tokens` of each request, by
        id.

        Called once, when the step is final. What the step leaves can be found from the next
        one on: steps run in order.
        """
        told: dict[str, StateSlots] = {}
        made: dict[bytes, int] = {}
        for request, num_tokens in tokens.items():
            held, begin = self._held[request], request.num_computed_tokens - num_tokens
            snapshots: list[tuple[int, int]] = []
            if self._keeps_snapshots:
                for position in self._positions(request, held, begin):
                    if (slot := self._make_snapshot(request, held, position, made)) is not None:
                        snapshots.append((position, slot))
            if snapshots or held.is_new:
                told[request.request_id] = StateSlots(held.slot, held.source, snapshots)
                held.source, held.is_new = held.slot, False
        self._busy.clear()
        self._snapshots |= made
        return told

    def skip(self) -> None:
        self._busy.clear()

    def stats(self) -> dict[str, int]:
        return {"num_state_slots": self.num_slots, "num_free_state_slots": self.num_free_slots}

    def forget(self, request: Request, block_hashes: Sequence[bytes]) -> None:
        """Drop the snapshots behind these blocks: they were not written after all."""
        for block_hash in block_hashes:
            if (slot := self._snapshots.pop(block_hash, None)) is not None:
                self._unused.append(slot)
                self._busy.discard(slot)
                self._drop_note(block_hash)

    def clear(self) -> None:
        """Forget all state snapshots and free their slots."""
        self._notes.clear()
        self._unused.extend(self._snapshots.values())
        self._snapshots.clear()
        self._busy.clear()

    def _positions(self, request: Request, held: _Held, begin: int) -> list[int]:
        """Return where behind `begin`, up to what is computed, a snapshot is wanted, ascending."""
        end = request.num_computed_tokens
        if end > request.num_tokens:  # the last token is not known yet: no request could find it
            return []
        if end == begin + 1 and end % self._block_size:
            return []  # most rows of most steps
        wanted = {*held.permanent}
        if not end % self._block_size:
            wanted.add(end)
        return sorted(position for position in wanted if begin < position <= end)

    def _make_snapshot(
        self, request: Request, held: _Held, position: int, made: dict[bytes, int]
    ) -> int | None:
        """Return a slot for the state behind `position` tokens, among those `made` for this step;
        None if there is one already, or none is free.
        """
        num_blocks = position // self._block_size
        hash_blocks(request, num_blocks, self._block_size)
        block_hash = request.block_hashes[num_blocks - 1]
        if block_hash in self._snapshots or block_hash in made:
            self._touch(block_hash)
            return None
        if position not in held.permanent:
            self._forget(held.latest)
            held.latest = block_hash
        if (slot := self._allocate()) is not None:
            made[block_hash] = slot
            if position in held.permanent:  # one that is replaced every few steps is not kept yet
                self._note_stored(block_hash, slot)
        return slot

    def _forget(self, block_hash: bytes) -> None:
        if (slot := self._snapshots.get(block_hash)) is not None and slot not in self._busy:
            self._unused.append(slot)
            del self._snapshots[block_hash]
            self._drop_note(block_hash)

    def _note_stored(self, block_hash: bytes, slot: int) -> None:
        if self._notes.stored is not None:
            self._notes.stored[block_hash] = slot

    def _drop_note(self, block_hash: bytes) -> None:
        if self._notes.stored is not None:
            self._notes.stored.pop(block_hash, None)

    def _allocate(self) -> int | None:
        """Return an unused slot, else that of the snapshot that was used least recently."""
        if self._unused:
            return self._unused.pop()
        for block_hash, slot in self._snapshots.items():
            if slot not in self._busy:
                return self._evict(block_hash)
        return None

    def _evict(self, block_hash: bytes) -> int:
        """Return the slot of a snapshot that is no longer to be found; it is intact until a step
        runs.
        """
        slot = self._snapshots.pop(block_hash)
        self._drop_note(block_hash)
        if self._notes.evicted is not None:
            self._notes.evicted[block_hash] = slot
        return slot
