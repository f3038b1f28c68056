"""Keeps blocks in slots of host memory and, below these, in a store such as a directory.

The scheduler's side: which content is in which slot, what is copied in which step, which request
waits for a read. Knows hashes, slots and steps. Knows no tensors, files or threads.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from aioserve.kv_cache import (
    BlockNotes,
    BlockPool,
    ExternalPrefix,
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorStats,
    OffloadPrice,
)
from aioserve.kv_connector.interface import BlockStore, KVConnectorWorker
from aioserve.request import Request

logger = logging.getLogger(__name__)

Role = Literal["both", "producer", "consumer"]

# Seconds that a request waits for a read before its prompt is computed instead. A guess: less than
# a policy may take to schedule a request, more than a disk that works.
READ_TIMEOUT = 10.0
# What is cheaper to compute is loaded all the same once in this many times: this is how it is
# noticed that loading has become quick again.
NUM_PASSED = 32


class _Transfers:
    """The blocks that one step copies to and from host memory."""

    def __init__(self) -> None:
        self.saves: dict[bytes, tuple[int, int]] = {}  # by content: block id, slot
        self.loads: list[tuple[int, int]] = []  # slot, block id


class OffloadingConnector(KVConnectorBase):
    """Without a `store`, what the pool evicts is saved; with one, every block that is computed, so
    that others find it there.

    A slot is held, by its count in `slots`, while a step in flight or the store may touch it, and
    while it waits for the request for which it was read. All others may be evicted.
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
        self.slots = BlockPool(worker.num_slots)
        saves = role != "consumer"
        self.notes = BlockNotes(stored=saves and store is not None, evicted=saves and store is None)
        self._worker = worker
        self._block_size = block_size
        self._store = store
        self._loads = role != "producer"
        self._offloads = role == "both"
        self._open = _Transfers()  # of the step that is being planned
        self._planned: deque[tuple[int, _Transfers]] = deque()  # not back yet
        #: Requests that wait for a read: its first block, and what calls the time limit off.
        self._waiting: dict[Request, tuple[int, Callable[[], None]]] = {}
        self._late: set[Request] = set()  # given up; while there are some, the store is not asked
        self._ready: dict[Request, None] = {}  # need wait no longer
        self._staged: dict[Request, list[int]] = {}  # slots that were read for them, or are kept
        self._kept: set[Request] = set()  # requests that were offloaded: they are loaded
        self._worth: dict[Request, bool] = {}  # whether loading is, as of the first admission
        self._num_passed = 0
        self._num_timeouts = 0
        self._num_raised = 0
        self._num_writes = 0  # that the store was asked for, which does them in order
        self._num_written = 0  # that it has done
        self._last_step_id = 0  # planned
        #: Called when all is saved: after the step of that id, and then after that many writes.
        self._for_step: deque[tuple[int, Callable[[], None]]] = deque()
        self._for_write: deque[tuple[int, Callable[[], None]]] = deque()

    # Requests, before they are admitted.

    def on_new_request(self, request: Request, num_computed_blocks: int) -> bool:
        store, hashes = self._store, request.block_hashes
        if store is None or not self._loads or self._late:
            return False
        first = self._end_in_slots(request, num_computed_blocks)
        if first >= self._num_blocks(request):
            return False
        call_off = store.call_later(READ_TIMEOUT, partial(self._give_up, request))
        self._waiting[request] = first, call_off
        wanted, found = hashes[first : self._num_blocks(request)], partial(self._found, request)
        self._ask(partial(store.find, wanted, found), lambda: found(0))
        return True

    def begin_step(self) -> list[Request]:
        if stored := self.notes.stored:
            self._save(stored)
            stored.clear()
        if not self._ready:
            return []
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        num_tokens, *price = self.get_external_prefix(request, num_computed_tokens)
        if not num_tokens or request in self._kept:
            return num_tokens
        if request not in self._worth:  # asked in every step, decided once
            self._worth[request] = self._is_worth(num_tokens, *price)
        return num_tokens if self._worth[request] else 0

    def get_external_prefix(self, request: Request, num_computed_tokens: int) -> ExternalPrefix:
        if not self._loads:
            return ExternalPrefix(0, 0.0, 0.0)
        first = num_computed_tokens // self._block_size
        num_blocks = self._end_in_slots(request, first) - first
        return ExternalPrefix(
            num_blocks * self._block_size,
            self._copy_seconds(num_blocks),
            self._compute_seconds(num_blocks),
        )

    def get_offload_price(self, request: Request, num_blocks: int) -> OffloadPrice:
        slots = [self.slots.lookup(h) for h in request.block_hashes[:num_blocks]]
        num_missing = slots.count(None)
        num_taken = sum(slot is None or not self.slots.ref_counts[slot] for slot in slots)
        loading = {block_id for _, block_id in self._open.loads}  # nothing is in these yet
        is_there = loading.isdisjoint(request.block_ids)
        if not self._offloads or not is_there or num_taken > self.slots.num_free_blocks:
            num_blocks = num_missing = 0
        return OffloadPrice(
            num_blocks * self._block_size,
            self._copy_seconds(num_missing),
            self._copy_seconds(num_blocks),
            self._compute_seconds(num_blocks),
        )

    def keep(self, request: Request, num_blocks: int) -> None:
        self._unstage(request)
        hashes = request.block_hashes[:num_blocks]
        self.slots.touch(slot for h in hashes if (slot := self.slots.lookup(h)) is not None)
        missing = {
            block_hash: block_id
            for block_hash, block_id in zip(hashes, request.block_ids, strict=False)
            if self.slots.lookup(block_hash) is None
        }
        self._save(missing)
        self.slots.touch(self._open.saves[block_hash][1] for block_hash in missing)
        self._staged[request] = [slot for h in hashes if (slot := self.slots.lookup(h)) is not None]
        self._kept.add(request)

    def keeps(self, request: Request) -> bool:
        return request in self._kept

    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> None:
        end = request.num_computed_tokens // self._block_size
        first = end - num_external_tokens // self._block_size
        if request.takes_cached_prefix:
            self.stats.num_queried_tokens += request.num_tokens - first * self._block_size
        self.stats.num_hit_tokens += num_external_tokens
        for block_hash, block_id in zip(
            request.block_hashes[first:end], request.block_ids[first:end], strict=True
        ):
            slot = self.slots.lookup(block_hash)
            assert slot is not None, "matched in this step"
            self.slots.touch([slot])
            self._open.loads.append((slot, block_id))
        self._unstage(request)

    def request_finished(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.pop(request)[1]()
        self._ready.pop(request, None)
        self._worth.pop(request, None)
        self._unstage(request)

    # Steps.

    def build_connector_meta(self, step_id: int) -> KVConnectorMetadata | None:
        if evicted := self.notes.evicted:
            self._save(evicted)
            evicted.clear()
        self._last_step_id = step_id
        step = self._open
        if not (step.saves or step.loads):
            return None
        self._open = _Transfers()
        self._planned.append((step_id, step))
        return KVConnectorMetadata(list(step.saves.values()), step.loads.copy())

    def update_connector_output(self, step_id: int) -> None:
        while self._planned and self._planned[0][0] <= step_id:
            self._settle(self._planned.popleft()[1])
        self._tell_saved(step_id)

    def when_saved(self, callback: Callable[[], None]) -> None:
        self._for_step.append((self._last_step_id, callback))

    def loading_blocks(self, after_step_id: int = 0) -> list[int]:
        steps = [step for step_id, step in self._planned if step_id > after_step_id]
        return [block_id for step in (*steps, self._open) for _, block_id in step.loads]

    def discard_steps(self, last_step_id: int) -> None:
        discarded, self._open = [self._open], _Transfers()
        while self._planned and self._planned[-1][0] > last_step_id:
            discarded.append(self._planned.pop()[1])
        for step in discarded:
            self._forget(step)
            self._release(step)

    def forget_unsettled(self) -> None:
        self.notes.clear()
        for step in (self._open, *(step for _, step in self._planned)):
            self._forget(step)
        self._tell_saved(self._last_step_id)  # nothing more comes of them

    def make_stats(self) -> KVConnectorStats:
        stats, worker, store = self.stats, self._worker, self._store
        stats.num_host_slots = worker.num_slots
        stats.num_host_blocks = self.slots.num_blocks - self.slots.num_unused_blocks
        stats.num_kept_blocks = sum(len(self._staged[request]) for request in self._kept)
        stats.load_seconds = worker.load_seconds
        stats.num_bytes_loaded = worker.num_loaded * worker.block_bytes
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
        self.slots.clear_index()

    async def shutdown(self) -> None:
        if self._store is not None:
            await self._store.close()
        self._num_written = self._num_writes
        self._tell_saved(self._last_step_id)

    def _save(self, contents: dict[bytes, int]) -> None:
        """Have blocks copied in this step, as far as there is room for those that are new."""
        size, stats = self._block_size, self.stats
        for block_hash, block_id in contents.items():
            slot = self.slots.lookup(block_hash)
            if slot is not None:
                self.slots.touch([slot])  # the last to be evicted
                self.slots.free([slot])
            elif not self.slots.num_free_blocks:
                stats.num_unsaved_tokens += size
            else:
                (slot,) = self.slots.allocate(1)
                self.slots.register([slot], [block_hash])
                self._open.saves[block_hash] = block_id, slot
                stats.num_saved_tokens += size
                stats.num_bytes_saved += self._worker.block_bytes

    def _settle(self, step: _Transfers) -> None:
        """What was copied is there: on to the store."""
        kept = {h: slot for h, (_, slot) in step.saves.items() if self.slots.lookup(h) == slot}
        if self._store is not None and kept:
            slots = list(kept.values())
            self.slots.touch(slots)
            self._num_writes += 1
            written = partial(self._was_written, slots)
            self._ask(partial(self._store.write, list(kept), slots, written), written)
        self._release(step)

    def _was_written(self, slots: list[int]) -> None:
        self._num_written += 1
        self.slots.free(slots)
        self._tell_saved()

    def _tell_saved(self, step_id: int = 0) -> None:
        """Steps up to that one are back, or will not be."""
        while self._for_step and self._for_step[0][0] <= step_id:
            self._for_write.append((self._num_writes, self._for_step.popleft()[1]))
        while self._for_write and self._for_write[0][0] <= self._num_written:
            self._for_write.popleft()[1]()

    def _forget(self, step: _Transfers) -> None:
        """What the step saves is not to be found."""
        for _, slot in step.saves.values():
            self.slots.unregister(slot)

    def _release(self, step: _Transfers) -> None:
        self.slots.free(slot for _, slot in step.saves.values())
        self.slots.free(slot for slot, _ in step.loads)

    # Reads.

    def _found(self, request: Request, num_found: int) -> None:
        """Note how many blocks of a request the store has, behind those in host memory."""
        if request not in self._waiting:
            self._late.discard(request)
            return
        store, (first, _) = self._store, self._waiting[request]
        assert store is not None, "it has answered"
        num_blocks = min(num_found, self.slots.num_free_blocks)
        price = store.seconds_to_read(num_blocks), self._compute_seconds(num_blocks)
        if not num_blocks or not self._is_worth(num_blocks * self._block_size, *price):
            self._be_ready(request)
            return
        hashes = request.block_hashes[first : first + num_blocks]
        slots = self.slots.allocate(num_blocks)
        was_read = partial(self._was_read, request, hashes, slots)
        self._ask(partial(store.read, hashes, slots, was_read), lambda: was_read(0))

    def _ask(self, ask: Callable[[], None], instead: Callable[[], None]) -> None:
        """A store that raises has nothing, and has written nothing: requests go on without."""
        try:
            ask()
        except Exception:
            self._num_raised += 1
            logger.warning("the store of KV blocks fails: it is done without", exc_info=True)
            instead()

    def _was_read(
        self, request: Request, hashes: Sequence[bytes], slots: list[int], num_read: int
    ) -> None:
        """They are in host memory, and stay there until the request is admitted."""
        self.slots.register(slots[:num_read], hashes[:num_read])
        self.stats.num_fetched_tokens += num_read * self._block_size
        if request in self._waiting:
            self._staged[request] = slots
            self._be_ready(request)
        else:
            self._late.discard(request)
            self.slots.free(slots)

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
        self._kept.discard(request)
        if slots := self._staged.pop(request, None):
            self.slots.free(reversed(slots))

    # Prices.

    def _copy_seconds(self, num_blocks: int) -> float:
        """As loads have taken so far: a copy out takes about as long."""
        worker = self._worker
        return worker.load_seconds / max(worker.num_loaded, 1) * num_blocks

    def _is_worth(self, num_tokens: int, load_seconds: float, compute_seconds: float) -> bool:
        """Whether loading is quicker, as far as is known; now and then also if it is not."""
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

    def _end_in_slots(self, request: Request, first: int) -> int:
        """Behind the last block in host memory, from block `first` on without a gap."""
        hashes, end = request.block_hashes, self._num_blocks(request)
        for i in range(first, min(end, len(hashes))):
            if self.slots.lookup(hashes[i]) is None:
                return i
        return max(first, end)
