"""Keeps blocks in slots of host memory and, below these, in a store such as a directory.

The scheduler's side: which content is in which slot, what is copied in which step, which request
waits for a read. Begins with the slots: `PoolSlots` are those of one pool; `KeptPools` knows of all
of them how far a request can begin behind its blocks. Knows hashes, slots and steps. Knows no
tensors, files or threads.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from aioserve.features.kv_connector.interface import BlockStore
from aioserve.kv_cache import (
    BLOCKS,
    BlockNotes,
    BlockPool,
    Copies,
    ExternalPrefix,
    KeptPool,
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorStats,
    OffloadPrice,
    Outside,
    reached_blocks,
)
from aioserve.request import Request
from aioserve.runner.interface import KVConnectorWorker, SlotGroup

logger = logging.getLogger(__name__)

# Slots of host memory for the contents of pools: which content is where, and what steps copy.


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
        """Return the key under which a store has the content."""
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
        """Return the end of the KV blocks in host memory, from block `first` on without a gap."""
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


# The connector.


Role = Literal["both", "producer", "consumer"]

# Seconds that a request waits for a read before its prompt is computed instead. A guess: less than
# a policy may take to schedule a request, more than a disk that works.
READ_TIMEOUT = 10.0
# What is cheaper to compute is loaded all the same once in this many times: this is how it is
# noticed that loading has become quick again.
NUM_PASSED = 32


class OffloadingConnector(KVConnectorBase):
    """A connector to host memory. Without a `store`, what a pool evicts is saved; with one, all
    that is computed, so that others find it there.

    What a request needs to begin behind a prefix may be in several pools, each of which has slots
    of its own: KV blocks for all of the prefix; of a model with states the state at its end, of
    layers with a window the blocks of the last window.
    """

    def __init__(
        self,
        worker: KVConnectorWorker,
        block_size: int,
        *,
        store: BlockStore | None = None,
        role: Role = "both",
    ) -> None:
        self.stats = KVConnectorStats()
        self._worker = worker
        self._block_size = block_size
        self._store = store
        self._loads = role != "producer"
        self._offloads = role == "both"
        self._pools = KeptPools(
            worker.groups,
            has_store=store is not None,
            saves=role != "consumer",
            loads=self._loads,
        )
        self.slots, self.notes = self._pools.blocks.slots, self._pools.blocks.notes
        #: Requests that wait for a read: its first block, and what calls the time limit off.
        self._waiting: dict[Request, tuple[int, Callable[[], None]]] = {}
        self._late: set[Request] = set()  # given up; while there are some, the store is not asked
        self._ready: dict[Request, None] = {}  # need wait no longer
        #: Slots that were read for requests, or are kept, by the pool.
        self._staged: dict[Request, list[tuple[PoolSlots, list[int]]]] = {}
        self._offloaded: set[Request] = set()  # requests that were: they are loaded
        self._worth: dict[Request, bool] = {}  # whether loading is, as of the first admission
        self._num_changes = 0  # of weights
        self._num_passed = 0
        self._num_timeouts = 0
        self._num_raised = 0
        self._num_writes = 0  # that the store was asked for, which does them in order
        self._num_written = 0  # that it has done
        self._last_step_id = 0  # planned
        #: Called when all is saved: after the step of that id, and then after that many writes.
        self._for_step: deque[tuple[int, Callable[[], None]]] = deque()
        self._for_write: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def outside(self) -> BlockPool:
        return self.slots

    def join(self, pool: KeptPool) -> Outside:
        return self._pools.join(pool)

    # Requests, before they are admitted.

    def on_new_request(self, request: Request, num_computed_blocks: int) -> bool:
        store, hashes = self._store, request.block_hashes
        if store is None or not self._loads or self._late:
            return False
        pools, end = self._pools, self._num_blocks(request)
        first = pools.end_in_slots(
            hashes[:end], pools.end_in_pool(hashes[:end], num_computed_blocks)
        )
        if pools.reached(request, first) >= end:
            return False
        call_off = store.call_later(READ_TIMEOUT, partial(self._give_up, request))
        self._waiting[request] = first, call_off
        wanted, found = hashes[first:end], partial(self._found, request)
        if wanted:
            self._ask(partial(store.find, wanted, found), lambda: found(0))
        else:  # states or windows alone are not here
            self._found(request, 0)
        return True

    def begin_step(self) -> list[Request]:
        for kept in self._pools:
            kept.save_stored()
        if not self._ready:
            return []
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        num_tokens, *price = self.get_external_prefix(request, num_computed_tokens)
        if not num_tokens or request in self._offloaded:
            return num_tokens
        if request not in self._worth:  # asked in every step, decided once
            self._worth[request] = self._is_worth(num_tokens, *price)
        return num_tokens if self._worth[request] else 0

    def get_external_prefix(self, request: Request, num_computed_tokens: int) -> ExternalPrefix:
        if not self._loads:
            return ExternalPrefix(0, 0.0, 0.0)
        pools, first = self._pools, num_computed_tokens // self._block_size
        end = pools.end_in_slots(request.block_hashes[: self._num_blocks(request)], first)
        if (num_blocks := pools.reached(request, end) - first) <= 0:
            return ExternalPrefix(0, 0.0, 0.0)
        return ExternalPrefix(
            num_blocks * self._block_size,
            self._copy_seconds(pools.num_bytes_to_load(request, first, first + num_blocks)),
            self._compute_seconds(num_blocks),
        )

    def get_offload_price(self, request: Request, num_blocks: int) -> OffloadPrice:
        pools = self._pools
        num_blocks = pools.reached(request, num_blocks)
        num_missing, num_bytes, fits = 0, 0, self._offloads
        for kept, hashes in pools.needed(request, num_blocks):
            slots = [kept.slots.lookup(h) for h in hashes]
            num_taken = sum(slot is None or not kept.slots.ref_counts[slot] for slot in slots)
            fits = fits and num_taken <= kept.slots.num_free_blocks
            num_missing += slots.count(None) * kept.block_bytes
            num_bytes += len(slots) * kept.block_bytes
        loading = {block_id for _, block_id in pools.blocks.open.loads}  # nothing is in these yet
        if not fits or not loading.isdisjoint(request.block_ids):
            num_blocks = num_missing = num_bytes = 0
        return OffloadPrice(
            num_blocks * self._block_size,
            self._copy_seconds(num_missing),
            self._copy_seconds(num_bytes),
            self._compute_seconds(num_blocks),
        )

    def keep(self, request: Request, num_blocks: int) -> None:
        self._unstage(request)
        self._staged[request] = staged = []
        for kept, hashes in self._pools.needed(request, num_blocks):
            if kept is self._pools.blocks:  # its own, be another one found under the hash
                lookup = kept.slots.lookup
                pairs = zip(hashes, request.block_ids, strict=False)
                kept.save({h: block_id for h, block_id in pairs if lookup(h) is None})
            staged.append((kept, kept.hold(hashes)))
        self._offloaded.add(request)

    def keeps(self, request: Request) -> bool:
        return request in self._offloaded

    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> None:
        end = request.num_computed_tokens // self._block_size
        first = end - num_external_tokens // self._block_size
        if request.takes_cached_prefix:
            self.stats.num_queried_tokens += request.num_tokens - first * self._block_size
        self.stats.num_hit_tokens += num_external_tokens
        if self._pools.has_blocks:
            for block_hash, block_id in zip(
                request.block_hashes[first:end], request.block_ids[first:end], strict=True
            ):
                self._pools.blocks.load(block_hash, block_id)
        self._unstage(request)

    def request_finished(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.pop(request)[1]()
        self._ready.pop(request, None)
        self._worth.pop(request, None)
        self._unstage(request)

    # Steps.

    def build_connector_meta(self, step_id: int) -> KVConnectorMetadata | None:
        self._last_step_id = step_id
        found = {kept.name: kept.plan(step_id) for kept in self._pools}
        copies = {name: own for name, own in found.items() if own is not None}
        return KVConnectorMetadata(*copies.pop(BLOCKS, ([], [])), copies) if copies else None

    def update_connector_output(self, step_id: int) -> None:
        for kept in self._pools:
            for step in kept.settle(step_id):
                self._write(kept, {h: slot for h, (_, slot) in step.saves.items()})
                kept.release(step)
        self._tell_saved(step_id)

    def when_saved(self, callback: Callable[[], None]) -> None:
        self._for_step.append((self._last_step_id, callback))

    def discard_steps(self, last_step_id: int) -> None:
        for kept in self._pools:
            kept.discard(last_step_id)

    def forget_unsettled(self) -> None:
        for kept in self._pools:
            kept.forget_unsettled()
        self._tell_saved(self._last_step_id)  # nothing more comes of them

    @property
    def num_held_slots(self) -> int:
        """Slots that steps in flight, the store or requests need now."""
        return sum(kept.slots.num_used_blocks for kept in self._pools)

    def make_stats(self) -> KVConnectorStats:
        stats, worker, store = self.stats, self._worker, self._store
        pools, size = [kept.slots for kept in self._pools], self._block_size
        stats.num_host_slots = sum(pool.num_blocks for pool in pools)
        stats.num_host_blocks = stats.num_host_slots - sum(p.num_unused_blocks for p in pools)
        stats.num_kept_blocks = sum(
            len(slots) for request in self._offloaded for _, slots in self._staged[request]
        )
        stats.num_saved_tokens = self._pools.blocks.num_saved * size
        stats.num_unsaved_tokens = self._pools.blocks.num_unsaved * size
        stats.num_bytes_saved = sum(k.num_saved * k.block_bytes for k in self._pools)
        stats.load_seconds = worker.load_seconds
        stats.num_bytes_loaded = worker.num_bytes_loaded
        if store is not None:
            stats.num_bytes_read, stats.num_bytes_written = (
                store.num_bytes_read,
                store.num_bytes_written,
            )
            stats.read_seconds = store.read_seconds
            stats.num_failures = self._num_timeouts + self._num_raised + store.num_failures
        return stats

    def reset(self) -> None:
        self.forget_unsettled()
        for kept in self._pools:
            kept.slots.clear_index()

    async def change_weights(self, path: str) -> None:
        self._num_changes += 1  # what is being read is of no use
        self.reset()
        for request in list(self._waiting):
            self._late.add(request)
            self._be_ready(request)
        if self._store is not None:
            await self._store.change_weights(path)

    async def shutdown(self) -> None:
        if self._store is not None:
            await self._store.close()
        self._num_written = self._num_writes
        self._tell_saved(self._last_step_id)

    def _write(self, kept: PoolSlots, saved: dict[bytes, int]) -> None:
        """Write the blocks that were copied on to the store."""
        found = {kept.key(h): slot for h, slot in saved.items() if kept.slots.lookup(h) == slot}
        if self._store is None or not found:
            return
        slots = list(found.values())
        kept.slots.touch(slots)
        self._num_writes += 1
        written = partial(self._was_written, kept, slots)
        numbers = [kept.first_slot + slot for slot in slots]
        self._ask(partial(self._store.write, list(found), numbers, written), written)

    def _was_written(self, kept: PoolSlots, slots: list[int]) -> None:
        self._num_written += 1
        kept.slots.free(slots)
        self._tell_saved()

    def _tell_saved(self, step_id: int = 0) -> None:
        """Steps up to that one are back, or will not be."""
        while self._for_step and self._for_step[0][0] <= step_id:
            self._for_write.append((self._num_writes, self._for_step.popleft()[1]))
        while self._for_write and self._for_write[0][0] <= self._num_written:
            self._for_write.popleft()[1]()

    # Reads.

    def _found(self, request: Request, num_found: int) -> None:
        """Note how many KV blocks of a request the store has, behind those in host memory; what
        else it needs to begin behind them is asked for.
        """
        if request not in self._waiting:
            self._late.discard(request)
            return
        store, (first, _) = self._store, self._waiting[request]
        assert store is not None, "it has answered"
        pools, end = self._pools, first
        if pools.has_blocks:
            end += min(num_found, self.slots.num_free_blocks)
        wanted = pools.to_find(request, pools.reached(request, first), end)
        found = partial(self._found_all, request, end)
        if wanted:
            self._ask(partial(store.find_each, wanted, found), lambda: found(frozenset()))
        else:
            found(frozenset())

    def _found_all(self, request: Request, end: int, keys: frozenset[bytes]) -> None:
        """Read what a request needs to begin behind as many of its first `end` blocks as may be,
        whose KV blocks are there, or in the store; what else the store has is in `keys`.
        """
        if request not in self._waiting:
            self._late.discard(request)
            return
        store, (first, _) = self._store, self._waiting[request]
        assert store is not None, "it has answered"
        pools = self._pools
        begin, end = pools.reached(request, first), pools.reached(request, end, keys)
        wanted = pools.missing(request, first, end)
        num_bytes = sum(kept.block_bytes * len(hashes) for kept, hashes in wanted)
        price = store.seconds_to_read(num_bytes), self._compute_seconds(end - begin)
        fits = all(len(hashes) <= kept.slots.num_free_blocks for kept, hashes in wanted)
        num_tokens = (end - begin) * self._block_size
        if end <= begin or not wanted or not fits or not self._is_worth(num_tokens, *price):
            self._be_ready(request)
            return
        taken = [(own, own[0].slots.allocate(len(own[1]))) for own in wanted]
        named = [kept.key(block_hash) for kept, hashes in wanted for block_hash in hashes]
        numbers = [kept.first_slot + slot for (kept, _), slots in taken for slot in slots]
        was_read = partial(self._was_read, request, taken, self._num_changes)
        self._ask(partial(store.read, named, numbers, was_read), lambda: was_read(0))

    def _ask(self, ask: Callable[[], None], instead: Callable[[], None]) -> None:
        """A store that raises has nothing, and has written nothing: requests go on without."""
        try:
            ask()
        except Exception:
            self._num_raised += 1
            logger.warning("the store of KV blocks fails: it is done without", exc_info=True)
            instead()

    def _was_read(
        self,
        request: Request,
        taken: list[tuple[Contents, list[int]]],
        num_changes: int,
        num_read: int,
    ) -> None:
        """The first of them are in host memory, and stay there until the request is admitted;
        unless weights have changed since.
        """
        if num_changes != self._num_changes:
            num_read = 0
        for (kept, hashes), slots in taken:
            num_own = min(num_read, len(slots))
            num_read -= num_own
            kept.slots.register(slots[:num_own], hashes[:num_own])
            if kept is self._pools.blocks:
                self.stats.num_fetched_tokens += num_own * self._block_size
        staged = [(kept, slots) for (kept, _), slots in taken]
        if request in self._waiting:
            self._staged[request] = staged
            self._be_ready(request)
        else:
            self._late.discard(request)
            for kept, slots in staged:
                kept.slots.free(slots)

    def _give_up(self, request: Request) -> None:
        if request in self._waiting:
            self._num_timeouts += 1
            self._late.add(request)
            self._be_ready(request)

    def _be_ready(self, request: Request) -> None:
        self._waiting.pop(request)[1]()
        self._ready[request] = None
        self.wake()

    def _unstage(self, request: Request) -> None:
        self._offloaded.discard(request)
        for kept, slots in self._staged.pop(request, ()):
            kept.slots.free(reversed(slots))

    # Prices.

    def _copy_seconds(self, num_bytes: int) -> float:
        """Return the seconds that loads have taken so far: a copy out takes about as long."""
        worker = self._worker
        return worker.load_seconds / max(worker.num_bytes_loaded, 1) * num_bytes

    def _is_worth(self, num_tokens: int, load_seconds: float, compute_seconds: float) -> bool:
        """Return whether loading is quicker, as far as is known; now and then also if it is not."""
        if not compute_seconds or load_seconds < compute_seconds:
            return True
        self._num_passed += 1
        if self._num_passed % NUM_PASSED == 0:
            return True
        self.stats.num_passed_tokens += num_tokens
        return False

    def _compute_seconds(self, num_blocks: int) -> float:
        step_time = self.step_time
        if step_time is None or not step_time.is_fitted:
            return 0.0
        return num_blocks * self._block_size * step_time.seconds_per_prompt_token

    def _num_blocks(self, request: Request) -> int:
        """That could be loaded: at least one token is left to compute and sample from."""
        return (request.num_tokens - 1) // self._block_size
