"""The bookkeeping of a scheduler: the queue of waiting requests, their deadlines, and the table.

`RequestTable` knows every unfinished request, where it stands, and what is in flight or not yet
told; one table passes from policy to policy. It does not know which request should run, nor what a
sampled token means; of the policy it knows the name, for messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, TypeAlias

from aioserve.errors import (
    FROM_OUTSIDE,
    EngineOverloadedError,
    InvariantError,
    PolicyError,
)
from aioserve.request import (
    CACHE_SECONDS,
    Request,
    RequestStatus,
    WaitReason,
    by_user,
    order_key,
)
from aioserve.scheduler.interface import Rejection
from aioserve.scheduler.output import OpenStep, SchedulerOutput

if TYPE_CHECKING:
    from aioserve.config import SchedulerConfig
    from aioserve.kv_cache import KVCacheManager
    from aioserve.scheduler.estimates import LengthHistory

#: The key that a policy gives a request: smaller ones go first. What it raises is a `PolicyError`.
Order: TypeAlias = Callable[[Request], Any]

MIN_COMPACTED = 64  # entries; a heap of timers with fewer is left as it is
FEW = 16  # times as many wait as get another key: then each is put in its place by itself


class RequestQueue:
    """Requests sorted by `order_key`, which is unique and fixed while a request waits.

    A sorted list: inserting moves pointers (some microseconds at 10,000), iterating costs only
    what is looked at, so a step's cost does not grow with the queue. Keys are a policy's: whatever
    comparing them does, no request is lost.
    """

    def __init__(self, group_by: Callable[[Request], str] = by_user) -> None:
        self.num_tokens = 0  # tokens of all waiting requests
        self._requests: list[Request] = []
        self._members: dict[Request, str] = {}  # with their groups
        self._group_by = group_by
        self._groups: dict[str, list[Request]] = {}  # each sorted the same way
        self._changed: set[str] | None = None  # groups whose first request changed; None: unasked
        self._version = 0  # bumped by every change, so that iterators can find their place again

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield requests in order. The queue may change meanwhile: what comes in before the place
        is skipped.
        """
        return self._walk(0)

    def from_key(self, key: Any) -> Iterator[Request]:
        """Yield requests in order, from the first whose `order` is `key` or more: those before it
        cost nothing.
        """
        yield from self._walk(bisect_left(self._requests, (key,), key=order_key))

    def _walk(self, i: int) -> Iterator[Request]:
        version = self._version
        while i < len(self._requests):
            request = self._requests[i]
            last = request.order_key
            yield request
            if self._version == version:
                i += 1
            else:
                i = bisect_right(self._requests, last, key=order_key)
                version = self._version

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def add(self, request: Request) -> None:
        """Put a request in its place. If comparing keys raises, nothing has changed."""
        if request in self._members:
            raise InvariantError(f"{request!r} waits already")
        group = self._group_by(request)
        own = self._groups.get(group, [])
        place = bisect_right(self._requests, request.order_key, key=order_key)
        own_place = bisect_right(own, request.order_key, key=order_key)
        self._requests.insert(place, request)
        own.insert(own_place, request)
        if own_place == 0 and self._changed is not None:
            self._changed.add(group)
        self._groups[group] = own
        self._members[request] = group
        self.num_tokens += request.num_tokens
        self._version += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Raises `InvariantError` if it does not wait."""
        if request not in self._members:
            raise InvariantError(f"{request!r} does not wait")
        group = self._members[request]
        own = self._groups[group]
        if own[0] is request and self._changed is not None:
            self._changed.add(group)
        for requests in (self._requests, own):
            del requests[0 if requests[0] is request else _place(requests, request)]
        if not own:
            del self._groups[group]
        del self._members[request]
        self.num_tokens -= request.num_tokens
        self._version += 1

    def heads(self) -> list[Request]:
        """Return the first waiting request of every group, by `group_by`: of every user, unless the
        policy says otherwise. The cost does not grow with the queue.
        """
        return [requests[0] for requests in self._groups.values()]

    def head(self, user: str) -> Request | None:
        """Return the first waiting request of a user, or of the group of that name; None: none
        waits.
        """
        requests = self._groups.get(user)
        return None if requests is None else requests[0]

    def group(self, name: str) -> list[Request]:
        """Return the waiting requests of a group, in order; none if no request of the group
        waits.
        """
        return self._groups.get(name, []).copy()

    def take_changed(self) -> list[str]:
        """Groups whose `head` is another one than at the last call, or none; at first all groups.
        The same events give the same order.
        """
        changed, self._changed = self._changed, set()
        return list(self._groups) if changed is None else sorted(changed)

    def sort(self, changed: Iterable[Request]) -> None:
        """Put all requests in their places after the keys of `changed` have changed. If comparing
        keys raises, nothing else has changed.
        """
        requests, before = sorted(self._requests, key=order_key), self._groups
        members = self._members | {request: self._group_by(request) for request in changed}
        groups: dict[str, list[Request]] = {}
        for request in requests:
            groups.setdefault(members[request], []).append(request)
        if self._changed is not None:
            self._changed.update(
                group
                for group in before | groups
                if before.get(group, [None])[0] is not groups.get(group, [None])[0]
            )
        self._requests, self._members, self._groups = requests, members, groups
        self._version += 1


def _place(requests: list[Request], request: Request) -> int:
    """Return where it stands; found the long way if its key says nothing, as NaN does."""
    with suppress(Exception):
        i = bisect_left(requests, request.order_key, key=order_key)
        if i < len(requests) and requests[i] is request:
            return i
    return requests.index(request)


class Timers:
    """A heap of due times by number, and the requests that the numbers stand for.

    A request that ends is forgotten at once, however far its deadline; its entries leave the heap
    when they are due, or when they are more than half of it.
    """

    def __init__(self, queue_timeout: float | None) -> None:
        """`queue_timeout`: seconds from arrival until a request that was never served is due."""
        self._queue_timeout = queue_timeout
        self._heap: list[tuple[float, int]] = []  # when, and the number of the timer
        self._watched: dict[int, tuple[Request, bool]] = {}  # by number; only if never served?
        self._numbers: dict[Request, list[int]] = {}  # of each request's timers
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch the request's deadline, if it has one, and its time in the queue."""
        if request.deadline is not None:
            self._push(request.deadline, request, only_if_unserved=False)
        if self._queue_timeout is not None:
            due = request.arrival_time + self._queue_timeout
            self._push(due, request, only_if_unserved=True)

    def forget(self, request: Request) -> None:
        """Drop the timers of a request that has ended."""
        if (numbers := self._numbers.pop(request, None)) is None:
            return
        for number in numbers:
            self._watched.pop(number, None)
        if len(self._heap) > max(2 * len(self._watched), MIN_COMPACTED):
            self._heap = [entry for entry in self._heap if entry[1] in self._watched]
            heapify(self._heap)

    def next_due(self) -> float | None:
        """Return when the next request is due; None: no request has a timer."""
        while self._heap:
            due, number = self._heap[0]
            if number in self._watched:
                request, only_if_unserved = self._watched[number]
                if not only_if_unserved or request.status is RequestStatus.WAITING:
                    return due
                del self._watched[number]
            heappop(self._heap)
        return None

    def take_due(self, now: float) -> list[Request]:
        """Return requests that are due, earliest first, each once."""
        due: dict[Request, None] = {}
        while self._heap and self._heap[0][0] <= now:
            _, number = heappop(self._heap)
            if number in self._watched:
                request, only_if_unserved = self._watched.pop(number)
                if not only_if_unserved or request.status is RequestStatus.WAITING:
                    due[request] = None
        return list(due)

    def _push(self, due: float, request: Request, *, only_if_unserved: bool) -> None:
        self._num_added += 1
        self._watched[self._num_added] = (request, only_if_unserved)
        self._numbers.setdefault(request, []).append(self._num_added)
        heappush(self._heap, (due, self._num_added))


class Decodes:
    """The requests with one token each in a step, in the forms that the runner receives."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.req_ids = [request.request_id for request in requests]
        self.num_scheduled = dict.fromkeys(self.req_ids, 1)


#: Where a step stopped admitting: its id; the `order_key` of the last request that the policy asked
#: for, None if it asked for none; and what that request lacked, or any other would, None if it is
#: nothing. Requests behind that one in line wait for the same. A plain tuple: most steps make one.
LineStop: TypeAlias = tuple[int, Any, WaitReason | None]
NO_STOP: LineStop = (0, None, None)


class StepsInFlight(deque[tuple[SchedulerOutput, list[Request]]]):
    """Steps with their rows, in the order in which they were planned and will come back."""

    def withdraw(self, output: SchedulerOutput) -> list[Request]:
        """The newest step does not go to the runner after all: its rows; none if it had none."""
        if self and self[-1][0] is output:
            return self.pop()[1]
        return []

    def carries(self, request: Request) -> bool:
        """Return whether a step in flight has the request among its rows."""
        return bool(self) and any(request in requests for _, requests in self)

    def num_tokens(self, request: Request) -> int:
        """Return tokens of the request that steps in flight compute, drafts included."""
        counts = (output.num_scheduled_tokens for output, rows in self if request in rows)
        return sum(count[request.request_id] for count in counts) if self else 0

    def requests(self) -> set[Request]:
        """Return all requests that are rows of a step in flight."""
        return {request for _, requests in self for request in requests}


class RequestTable:
    """All requests that have not ended, each in `waiting`, `aside` or `running`, and whatever the
    runner is still to return or to be told. One book passes from policy to policy.
    """

    def __init__(
        self,
        policy_name: str,
        kv_cache: KVCacheManager,
        queue_timeout: float | None,
        group_by: Callable[[Request], str] = by_user,
    ) -> None:
        """`queue_timeout`: seconds until a request that was never served is due; None: never."""
        self.policy_name = policy_name  # of the one that plans
        self.kv_cache = kv_cache
        self.requests: dict[str, Request] = {}  # all that are not finished, in order of arrival
        self.waiting = RequestQueue(group_by)
        self._running: list[Request] = []
        self._requeued: set[Request] = set()  # not yet taken out of `_running`
        self.paused: dict[Request, bool] = {}  # they wait and hold blocks; were these prefetched?
        #: Finished, but a step in flight may write their blocks. In order, as all that a plan may
        #: depend on: the same events give the same plan.
        self.ended: dict[Request, None] = {}
        self.in_flight = StepsInFlight()
        self.stale: set[Request] = set()  # what steps in flight bring for these is dropped
        self.timers = Timers(queue_timeout)
        self.num_steps = 0  # planned so far
        self.open_step: OpenStep | None = None
        self.line_stop = NO_STOP  # where the last step stopped admitting
        self.last_output: SchedulerOutput | None = None
        self.finished_req_ids: list[str] = []  # not yet told to the runner
        self.rejected: dict[Request, Rejection] = {}  # by the step that is planned
        self.just_ended: list[Request] | None = None  # to tell of in the next step; None: of none
        self.tells_all_ends = False  # False: only of requests whose clients ask for a lease
        self.reply_lengths: LengthHistory | None = None  # None: no policy has learned any
        self._untold_preempted: list[str] = []  # from a step that the runner never saw
        self._last_decodes = Decodes([])
        self._num_added = 0
        self.num_preemptions = 0
        self.num_draft_tokens = 0  # that came back
        self.num_accepted_tokens = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0

    @property
    def running(self) -> list[Request]:
        """Requests that run, in order of admission: replaced, never shrunk in place. What was
        requeued leaves it when it is next asked for, so that many cost one walk.
        """
        if gone := self._requeued:
            self._running = [r for r in self._running if r not in gone]
            self._requeued = set()
        return self._running

    @property
    def aside(self) -> set[Request]:
        """Requests that are in no line until what they need has come."""
        return {request for resource in self.kv_cache.holding for request in resource.aside}

    # Arrival of requests, and their order.

    def add(self, request: Request, order: Order) -> None:
        """A new request, in line. If this raises, nothing remains of it."""
        request.order_key = (order(request), self._num_added)
        self.line_up(request)
        try:
            is_aside = self.kv_cache.holds_back(request)
        except BaseException:  # a connector may be another author's
            self.waiting.remove(request)
            raise
        if is_aside:
            self.waiting.remove(request)
        self.requests[request.request_id] = request
        self.timers.add(request)
        self._num_added += 1

    def follow(
        self, policy_name: str, order: Order, group_by: Callable[[Request], str] = by_user
    ) -> None:
        """Another policy from here on: every request gets a key of its order, and the queue
        is sorted again. Raises `PolicyError` half-way; `restored_on_error` stands around it.
        """
        self.policy_name = policy_name
        step_id, _, lacking = self.line_stop
        self.line_stop = step_id, None, lacking  # its key compares with none of the new ones
        waiting = list(self.waiting)  # before its keys change
        for request in self.requests.values():
            request.order_key = (order(request), request.order_key[1])
        self.waiting = RequestQueue(group_by)
        for request in waiting:
            self.line_up(request)

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """If the block raises, the policy, the keys and the line are what they were before."""
        before = self.policy_name, self.waiting, self.line_stop
        keys = [(request, request.order_key) for request in self.requests.values()]
        try:
            yield
        except BaseException:
            self.policy_name, self.waiting, self.line_stop = before
            for request, key in keys:
                request.order_key = key
            raise

    def line_up(self, request: Request) -> None:
        """Put a request in its place. Raises `PolicyError` for a key that cannot be compared."""
        try:
            self.waiting.add(request)
        except (InvariantError, PolicyError):
            raise
        except Exception as error:
            raise PolicyError(
                f"policy {self.policy_name}: order() returned {request.order_key[0]!r:.100}, "
                f"which cannot be compared: {error!r}"
            ) from error

    def reorder(self, requests: Iterable[Request], order: Order) -> None:
        """Give waiting requests of `requests` the keys that `order` has for them now, and their
        places. If the policy raises, nothing has changed.
        """
        before: dict[Request, Any] = {}  # of requests whose key is another one now
        keys: dict[Request, Any] = {}
        in_bulk = False
        try:
            for request in [request for request in requests if request in self.waiting]:
                old, key = request.order_key, order(request)
                if key != old[0]:
                    before[request], keys[request] = old, (key, old[1])
            in_bulk = len(keys) * FEW >= len(self.waiting)
            self._place(keys, in_bulk)
        except InvariantError:
            raise
        except BaseException as error:
            self._place(before, in_bulk)
            if isinstance(error, (PolicyError, *FROM_OUTSIDE)):
                raise
            raise PolicyError(
                f"policy {self.policy_name}: order() returned keys that cannot be compared: "
                f"{error!r}"
            ) from error

    def _place(self, keys: dict[Request, Any], in_bulk: bool) -> None:
        """Give waiting requests these keys; if that raises, some of them may be out of line."""
        waiting = self.waiting
        if in_bulk:
            for request, key in keys.items():
                request.order_key = key
            waiting.sort(keys)
            return
        for request in keys:
            if request in waiting:
                waiting.remove(request)
        for request, key in keys.items():
            request.order_key = key
            self.line_up(request)

    def check_queue(
        self, config: SchedulerConfig, num_tokens: int, num_arriving: int, arriving_tokens: int
    ) -> None:
        """Raises `EngineOverloadedError` if too many requests or prompt tokens wait already for one
        more of `num_tokens`; those that are arriving, but not in the queue yet, wait as well.
        """
        num_waiting = len(self.waiting) + num_arriving
        if num_waiting >= config.max_waiting_requests:
            raise EngineOverloadedError(
                f"{num_waiting} requests are waiting already (max_waiting_requests)"
            )
        limit = config.max_waiting_tokens
        waiting_tokens = self.waiting.num_tokens + arriving_tokens
        if limit is not None and num_waiting and waiting_tokens + num_tokens > limit:
            raise EngineOverloadedError(
                f"{waiting_tokens} prompt tokens are waiting already; {num_tokens} "
                f"more would be over max_waiting_tokens ({limit})"
            )

    # Running requests, and preemption.

    def start(self, request: Request) -> None:
        """A waiting request runs from now on."""
        self.waiting.remove(request)
        self.paused.pop(request, None)
        self.running.append(request)
        request.status = RequestStatus.RUNNING

    def requeue(self, requests: dict[Request, RequestStatus | None], order: Order) -> None:
        """Let running requests wait again, each where `order` puts it now; by each its status
        before, if it was admitted in this very step. If the policy raises, nothing has changed.
        """
        before = [
            (r.status, r.num_computed_tokens, r.num_preemptions, r.order_key) for r in requests
        ]
        try:
            for request, status in requests.items():
                request.status = status or RequestStatus.PREEMPTED
                request.num_computed_tokens = 0
                request.num_preemptions += status is None
                # The running number keeps equals in order of arrival, also after a preemption.
                request.order_key = (order(request), request.order_key[1])
                self.line_up(request)
        except BaseException:  # a call that took too long is ended where it stands
            for request, (status, num_computed, num_preemptions, key) in zip(
                requests, before, strict=True
            ):
                if request in self.waiting:
                    self.waiting.remove(request)
                request.status, request.num_computed_tokens = status, num_computed
                request.num_preemptions, request.order_key = num_preemptions, key
            raise
        self.num_preemptions += sum(status is None for status in requests.values())
        self._requeued.update(requests)

    def tell_preempted(self, requests: Iterable[Request]) -> None:
        """The runner hears with the next step that these have lost their places."""
        self._untold_preempted += [request.request_id for request in requests]
        self._last_decodes = Decodes([])

    def take_back(self, request: Request) -> None:
        """Take everything from a request that waits again."""
        self.kv_cache.free(request)
        request.draft_token_ids = []
        request.num_target_tokens = request.num_tokens

    def drop_paused(self, request: Request) -> None:
        """A paused request loses its blocks, and waits where it stands to be computed again."""
        del self.paused[request]
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.take_back(request)

    def drop_copies(self) -> None:
        """A step has failed or is not sent: what the connector copied in steps that are not back is
        not to be found, be there a request in them or not, and prefetched requests lose their
        blocks.
        """
        for request in [request for request, prefetched in self.paused.items() if prefetched]:
            self.drop_paused(request)
        if (connector := self.kv_cache.connector) is not None:
            connector.forget_unsettled()

    # A step, from its beginning until it is back.

    def begin_step(self, step: OpenStep) -> None:
        """Raises `PolicyError` if one is under construction already."""
        if self.open_step is not None:
            raise PolicyError(
                f"policy {self.policy_name}: a new step was begun, but output() of the last one "
                "was not returned"
            )
        self.open_step = step
        if self.rejected:  # by a step that came to nothing
            self.rejected = {}
        step.tokens = {}
        step.preempted_req_ids, self._untold_preempted = self._untold_preempted, []
        for resource in self.kv_cache.holding:
            for request in resource.ready():
                self.line_up(request)
                resource.let_go(request)

    def close_step(self, step: OpenStep) -> list[str]:
        """The step is planned; returns the ids of the ended that it has to tell the runner."""
        if self.open_step is not step:
            raise PolicyError(
                f"policy {self.policy_name}: output() was called twice, or on an old step"
            )
        self.open_step = None
        self.num_steps = step.step_id
        finished_req_ids, self.finished_req_ids = self.finished_req_ids, []
        return finished_req_ids

    def decodes_of(self, requests: list[Request]) -> Decodes:
        """Return those of the last step of decodes, if it had the same rows: most steps repeat
        them.
        """
        if requests != self._last_decodes.requests:
            self._last_decodes = Decodes(requests)
        return self._last_decodes

    def commit(
        self, output: SchedulerOutput, requests: list[Request], num_prefill_tokens: int
    ) -> None:
        """The step goes to the runner, with these rows."""
        self.last_output = output
        if not requests:
            return
        self.in_flight.append((output, requests))
        self.num_prefill_tokens += num_prefill_tokens
        self.num_decode_tokens += output.total_num_scheduled_tokens - num_prefill_tokens

    def count_decodes(self, num_steps: int, num_rows: int) -> None:
        """Count `num_steps` steps of `num_rows` decodes each, planned together."""
        self.num_steps += num_steps
        self.num_decode_tokens += num_steps * num_rows

    def discard_step(self, last_step_id: int) -> list[Request]:
        """Nothing after `last_step_id` goes to the runner. Returns the live requests that had a
        place in it: the caller ends them and has them forgotten.
        """
        step, output = self.open_step, self.last_output
        self.open_step = None
        for resource in self.kv_cache.resources:
            resource.discard_steps(last_step_id)
        touched: list[Request] = []
        if step is not None:
            touched += step.tokens
            self._untold_preempted = step.preempted_req_ids
        if output is not None and output.step_id > last_step_id:
            self._untold_preempted = output.preempted_req_ids + self._untold_preempted
            self.finished_req_ids = output.finished_req_ids + self.finished_req_ids
            touched += self.in_flight.withdraw(output)
        return [request for request in touched if not request.status.is_finished]

    def land(self, output: SchedulerOutput) -> list[Request]:
        """A step is back: its rows. What ended meanwhile keeps its blocks until `settle`."""
        expected, requests = self.in_flight.popleft()
        while expected is not output:
            self.settle(requests)  # a policy has kept the result of this one for itself
            expected, requests = self.in_flight.popleft()
        return requests

    def abandon(self, output: SchedulerOutput) -> list[str]:
        """Take back a step over whose result the policy raised. Return the ids of the requests that
        the step carried and that live.
        """
        if any(step is output for step, _ in self.in_flight):
            self.land(output)
        self.drop_finished()  # of those that the policy's half-way work has ended
        self.settle(list(self.ended))
        # An id may be another request's by now, which then waits for its first step.
        there = map(self.requests.get, output.num_scheduled_tokens)
        waiting = RequestStatus.WAITING
        return [r.request_id for r in there if r is not None and r.status is not waiting]

    def settle(self, requests: list[Request]) -> None:
        """After a step is back: blocks are freed that were only held for it."""
        for request in requests:
            if request in self.ended and not self.in_flight.carries(request):
                del self.ended[request]
                self.kv_cache.free(request)
        self.stale = {request for request in self.stale if self.in_flight.carries(request)}

    # Ends of requests.

    def take_rejected(self) -> dict[str, Rejection]:
        """Return what the newest step rejects and has not admitted all the same, by id."""
        rejected, self.rejected = self.rejected, {}
        return {r.request_id: why for r, why in rejected.items() if r in self.waiting}

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        """End requests and return their ids, as `SchedulerInterface.finish_requests` says."""
        if not finished_status.is_finished:
            raise InvariantError(f"requests cannot end with status {finished_status.name}")
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        finished = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self.finish(request, finished_status)
                finished.append(request_id)
        if finished:
            self.drop_finished()
        if finished_status is RequestStatus.FINISHED_ERROR:
            self.forget(self.ended)  # they ended while a step computed, which may have failed
        return finished

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop from the caches what the requests were to compute: a step of theirs failed."""
        for request in requests:
            self.kv_cache.forget(request)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request; the caller has it dropped from `running`, by `drop_finished`."""
        before = request.status
        if before is not RequestStatus.RUNNING and request in self.waiting:
            self.waiting.remove(request)
            self.paused.pop(request, None)
        if before is not RequestStatus.WAITING:  # else the runner never heard of it
            self.finished_req_ids.append(request.request_id)
        request.status = status
        if self.just_ended is not None and (self.tells_all_ends or CACHE_SECONDS in request.hints):
            self.just_ended.append(request)
        del self.requests[request.request_id]
        self.timers.forget(request)
        self.kv_cache.leave(request)
        if request.block_ids and status is not RequestStatus.FINISHED_ERROR:
            self.kv_cache.cache_full_blocks(request, self._num_written_tokens(request))
        if self.in_flight.carries(request):
            self.ended[request] = None
        else:
            self.kv_cache.free(request)

    def drop_finished(self) -> None:
        """Some of `running` have ended: nothing here may keep them."""
        running = RequestStatus.RUNNING  # to look it up for each takes longer than the rest
        self._running = [r for r in self.running if r.status is running]
        self._last_decodes = Decodes([])

    def _num_written_tokens(self, request: Request) -> int:
        """Return how many tokens have their keys and values in blocks now: not those of steps in
        flight.

        The newest never counts: a draft token that was wrong may stand in its place.
        """
        num_written = request.num_computed_tokens - self.in_flight.num_tokens(request)
        return min(num_written, request.num_tokens - 1)
