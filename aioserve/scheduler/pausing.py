"""Pause: a running request steps aside and keeps its KV blocks, until it is admitted again.

A paused request waits in line like any other. It holds no seat, no row of the runner's batch and no
adapter's place, and goes on where it stopped. Its blocks are what gives way first when memory runs
short. (Andes, Liu et al., 2024, and TokenFlow, Chen et al., 2025, pause requests that are ahead of
their readers.) Knows what a step has given to which request; when to pause, the policy knows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from itertools import chain

from aioserve.kv_cache import KVCacheManager, Vacancy
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler.queue import order_key
from aioserve.scheduler.request_table import OpenStep, Order, RequestTable

Place = WaitReason | tuple[list[int], int, int]  # why a request has to wait, or what it gets

#: What no request has to give, paused or running: it is the step's own.
OF_STEP = (WaitReason.BUDGET, WaitReason.ENCODER_BUDGET)
#: What paused requests do not hold.
OF_RUNNING = (*OF_STEP, WaitReason.SEATS, WaitReason.ADAPTERS)


class Pausing:
    """What a scheduler shows of its paused requests."""

    book: RequestTable

    @property
    def paused_requests(self) -> list[Request]:
        """Waiting requests that `step.pause` let step aside, the first of them first."""
        return list(self.book.paused)


def drop_paused(book: RequestTable, request: Request) -> None:
    """A paused request loses its blocks, and waits where it stands to be computed again."""
    del book.paused[request]
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    book.num_preemptions += 1
    book.take_back(request)


class PausingStep(OpenStep, ABC):
    """A step that can take back what it gave, and let requests wait which keep their blocks."""

    __slots__ = ("token_budget",)

    _admitted: dict[Request, RequestStatus]
    _book: RequestTable
    _dependents: dict[Request, list[Request]]
    _drafts: dict[str, list[int]]
    _fresh_blocks: dict[int, Request]
    _kv_cache: KVCacheManager
    _new_block_ids: dict[str, list[int]]
    _order: Order
    _preempted: set[Request]
    token_budget: int

    @abstractmethod
    def preempt(self, request: Request) -> None:
        """Preempt a running or paused request: it loses its place, and its KV blocks are freed."""

    @abstractmethod
    def _find_place(
        self, request: Request, max_tokens: int | None, whole: bool, gone: Vacancy | None = None
    ) -> Place:
        """What a waiting request gets in this step, or the reason why it has to wait. With `gone`:
        as if the requests there had lost what they hold.
        """

    def pause(self, request: Request) -> bool:
        """Let a running request step aside: it gives up its seat, keeps its KV blocks, and goes on
        from there when `admit` takes it again. Until then it is in `waiting` and `paused_requests`.

        Its tokens of this step are refunded. When memory runs short, paused requests lose their
        blocks, the last of them in order first, before a running request does; they are preempted
        then. Returns whether it is paused: not if it does not run, was admitted in this step, or
        needs the states of all its prompt (`takes_cached_prefix` is False). Raises `PolicyError` if
        `order` does; it runs on then.
        """
        if request in self._admitted or not request.takes_cached_prefix:
            return False
        for dependent in self._dependents.pop(request, ()):  # for these it was to compute something
            self.preempt(dependent)
        if request.status is not RequestStatus.RUNNING:  # also if each relies on the other
            return False
        num_computed = request.num_computed_tokens - self.tokens.get(request, 0)
        new_block_ids = self._new_block_ids.get(request.request_id, [])
        self._book.requeue({request: RequestStatus.PAUSED}, self._order)
        self._refund(request)
        self._take_back_blocks(request, new_block_ids)
        request.num_computed_tokens = num_computed
        request.num_target_tokens = request.num_tokens
        request.draft_token_ids = []
        num_full = min(num_computed, request.num_tokens) // self._kv_cache.block_size
        request.num_cached_blocks = min(request.num_cached_blocks, num_full)
        for resource in self._kv_cache.resources:
            resource.pause(request)
        self._book.paused[request] = False
        self._preempted.add(request)
        self.preempted_req_ids.append(request.request_id)
        return True

    def _refund(self, request: Request) -> None:
        num_tokens = self.tokens.pop(request, 0)
        self.token_budget += num_tokens
        self._new_block_ids.pop(request.request_id, None)
        self._drafts.pop(request.request_id, None)
        self._kv_cache.refund(request)
        for block_id, owner in list(self._fresh_blocks.items()):
            if owner is request:
                del self._fresh_blocks[block_id]
                if num_tokens:  # it would have been written by the tokens just refunded
                    self._kv_cache.pool.unregister(block_id)

    def _take_back_blocks(self, request: Request, block_ids: list[int]) -> None:
        """The last blocks of a request, which were for what has been refunded."""
        self._kv_cache.pool.free(reversed(block_ids))
        request.block_ids = request.block_ids[: len(request.block_ids) - len(block_ids)]
        request.num_slots = len(request.block_ids) * self._kv_cache.block_size

    def _status_before(self, request: Request) -> RequestStatus | None:
        """What a running request goes back to if it loses its place; None: it is preempted."""
        status = self._admitted.get(request)
        return None if status is RequestStatus.PAUSED else status

    def _note_preempted(self, request: Request) -> None:
        self._preempted.add(request)
        if request.request_id not in self.preempted_req_ids:  # if it was paused in this step
            self.preempted_req_ids.append(request.request_id)

    def _paused_req_ids(self) -> list[str]:
        """Of the requests that leave the batch, those that keep their blocks."""
        requests, paused = self._book.requests, self._book.paused
        return [i for i in self.preempted_req_ids if requests.get(i) in paused]

    def _drop_paused(self, request: Request) -> None:
        drop_paused(self._book, request)
        self._note_preempted(request)

    def _resume(self, request: Request, num_slots: int) -> None:
        """A paused request, of which there is room for `num_slots` tokens, runs again."""
        kv_cache = self._kv_cache
        num_missing = -(-num_slots // kv_cache.block_size) - len(request.block_ids)
        if num_missing > 0:
            kv_cache.grow(request, num_missing)
        for resource in kv_cache.resources:
            resource.resume(request)

    def _drop_last_paused(self, but: Request) -> bool:
        """Of the paused requests, the last in order loses its blocks. False: there is none."""
        last = max((r for r in self._book.paused if r is not but), key=order_key, default=None)
        if last is not None:
            self.preempt(last)
        return last is not None

    def _make_room(
        self,
        request: Request,
        max_tokens: int | None,
        whole: bool,
        displacing: Iterable[Request],
        place: Place,
    ) -> Place:
        """The place of a waiting request that has to wait, once the paused requests and those of
        `displacing` have lost what it lacks: as few as are needed, and none if that does not help.
        Before them leases end, if nothing runs.
        """
        leases = self._kv_cache.leases
        while place is WaitReason.BLOCKS and not self._book.running and leases.give_way():
            place = self._find_place(request, max_tokens, whole)
        if place is WaitReason.BLOCKS and leases.held and leases.num_held_blocks:
            place = WaitReason.LEASES
        if not isinstance(place, WaitReason):
            return place
        if place in OF_STEP or not (displacing or place not in OF_RUNNING):
            return place
        paused = [r for r in self._book.paused if r is not request]
        paused.sort(key=order_key, reverse=True)
        gone = Vacancy(self._kv_cache.pool, self._fresh_blocks, self._dependents)
        find = partial(self._find_place, request, max_tokens, whole)
        victims = gone.choose(chain(paused, displacing), lambda: find(gone))
        for victim in victims:
            self.preempt(victim)
        return find() if victims else place
