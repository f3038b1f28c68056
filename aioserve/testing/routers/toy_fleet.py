"""A small fleet behind a router, on a clock of its own: arrivals, deaths, returns, stale knowledge.

Notes every decision. Knows no rule. Times are in seconds.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

import msgspec

from aioserve.routing import (
    MAX_WAIT_SECONDS,
    MIN_WAIT_SECONDS,
    BaseRouter,
    Dispatcher,
    Refuse,
    RoutedRequest,
    Wait,
)
from aioserve.testing.routers.toy_replica import Served, ToyReplica

COPY_SECONDS = 0.02  # of the KV blocks of a request to another replica


class Decision(NamedTuple):
    """What the router answered about a request."""

    when: float
    request_id: str
    answer: str  # the name of a replica, or a refusal or wait in words


class ToyFleet:
    """Replicas `r0`, `r1`, ...; `run` goes on until nothing more happens."""

    def __init__(
        self,
        kind: type[BaseRouter],
        options: Mapping[str, Any],
        num_replicas: int,
        *,
        delay: float = 0.0,
        silent: frozenset[str] = frozenset(),
        seed: int = 0,
        roles: Sequence[str] = (),
    ) -> None:
        """What replicas say reaches the router `delay` seconds later; the `silent` ones say
        nothing. `roles` are those of the first replicas; the others have none.
        """
        self.now = 0.0
        self.dispatcher = Dispatcher(kind, dict(options), seed=seed, clock=lambda: self.now)
        self.replicas: dict[str, ToyReplica] = {}  # that live
        self.decisions: list[Decision] = []
        self.ends: dict[str, str] = {}  # by request: served, refused, failed
        self.num_sent: Counter[str] = Counter()  # by replica
        self.most_moves = 0  # of one request to other replicas
        self.most_held: Counter[str] = Counter()  # by replica: requests at one time
        self._delay = delay
        self._silent = silent
        self._roles = roles
        self._split_to: dict[str, str] = {}  # by request: the replica that makes the reply
        self._last_arrival = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._num_events = 0
        for number in range(num_replicas):
            self.start(f"r{number}")
        if (seconds := kind.rebalance_seconds) is not None:
            self.at(seconds, partial(self._rebalance, seconds))

    def at(self, when: float, happens: Callable[[], object]) -> None:
        """Have something happen at a time."""
        self._num_events += 1
        heappush(self._heap, (when, self._num_events, happens))

    def arrive(self, when: float, request: RoutedRequest) -> None:
        """A request comes at a time."""
        self._last_arrival = max(self._last_arrival, when)
        arrived = msgspec.structs.replace(request, arrival_time=when)
        self.at(when, partial(self._send, arrived, frozenset(), None))

    def start(self, name: str) -> None:
        """A replica is there from now on, with nothing in its memory."""
        self.replicas[name] = ToyReplica(name)
        number = int(name[1:])
        role = self._roles[number] if number < len(self._roles) else ""
        self._tell(partial(self.dispatcher.join, name, number, role))
        self._report(name)

    def kill(self, name: str) -> None:
        """A replica dies: requests without a first token are sent again, the others have failed."""
        replica = self.replicas.pop(name)
        self._tell(partial(self.dispatcher.leave, name))
        held = [*replica.running, *replica.queue]
        for served in held:
            served.assignment.has_ended()
        for served in held:
            if 0 <= served.started_at <= self.now:
                self.ends[served.request.request_id] = "failed"
            else:
                attempts = served.request.num_attempts + 1
                again = msgspec.structs.replace(served.request, num_attempts=attempts)
                self._send(again, frozenset({name}), None)

    def run(self) -> None:
        """Let the clock go on until no request waits, runs or arrives any more."""
        while self._heap:
            self.now, _, happens = heappop(self._heap)
            happens()

    def answers(self) -> list[str]:
        """The answers in order, in words."""
        return [decision.answer for decision in self.decisions]

    def _send(self, request: RoutedRequest, avoid: frozenset[str], since: float | None) -> None:
        answer, decode = self.dispatcher.choose_both(request, avoid)
        said = answer if isinstance(answer, str) else repr(answer)
        self._split_to.pop(request.request_id, None)
        if decode is not None:
            said = f"{said} {decode}"
            self._split_to[request.request_id] = decode
        self.decisions.append(Decision(self.now, request.request_id, said))
        if isinstance(answer, str):
            if answer in self.replicas:
                self._hand_over(request, answer)
            else:  # it is dead, and the router has not heard
                attempts = request.num_attempts + 1
                again = msgspec.structs.replace(request, num_attempts=attempts)
                self._send(again, avoid | {answer}, since)
        elif isinstance(answer, Wait):
            since = self.now if since is None else since
            if self.now - since >= MAX_WAIT_SECONDS:
                self.ends[request.request_id] = "waited"
            else:
                when = self.now + max(answer.seconds, MIN_WAIT_SECONDS)
                self.at(when, partial(self._send, request, frozenset(), since))
        elif isinstance(answer, Refuse):
            self.ends[request.request_id] = "refused"
        else:  # none is there
            self.ends[request.request_id] = "failed"

    def _hand_over(self, request: RoutedRequest, name: str) -> None:
        replica = self.replicas[name]
        served = Served(request, self.dispatcher.assign(request, name))
        self.num_sent[name] += 1
        replica.queue.append(served)
        self.most_held[name] = max(self.most_held[name], replica.num_requests)
        self._seat(replica)

    def _seat(self, replica: ToyReplica) -> None:
        """Requests that wait get seats; the router hears of it."""
        before = {id(served) for served in replica.running}
        for event in replica.seat(self.now):
            if replica.name not in self._silent:
                self._tell(partial(self.dispatcher.on_kv_event, replica.name, event))
        for served in replica.running:
            if id(served) not in before:
                if served.remaining is None:
                    self.at(served.started_at, partial(self._has_started, replica, served))
                self.at(served.ends_at, partial(self._has_ended, replica, served))
        self._report(replica.name)

    def _has_started(self, replica: ToyReplica, served: Served) -> None:
        if self.replicas.get(replica.name) is replica:
            served.assignment.has_started(self.now)
            decode = self._split_to.pop(served.request.request_id, None)
            if decode is not None and self.now < served.ends_at:
                self.at(self.now + COPY_SECONDS, partial(self._move, replica, served, decode))

    def _rebalance(self, seconds: float) -> None:
        """Move what the router wants to have moved, while requests come or are there."""
        there = {
            served.request.request_id: (replica, served)
            for replica in self.replicas.values()
            for served in replica.running
            if served.started_at <= self.now
        }
        if self.dispatcher.names:
            for answer in self.dispatcher.rebalance():
                if answer.request_id in there:
                    replica, served = there[answer.request_id]
                    copied = partial(self._move, replica, served, answer.to.name)
                    self.at(self.now + COPY_SECONDS, copied)
        held = any(replica.num_requests for replica in self.replicas.values())
        if held or self.now < self._last_arrival:
            self.at(self.now + seconds, partial(self._rebalance, seconds))

    def _move(self, replica: ToyReplica, served: Served, name: str) -> None:
        """The blocks of a request have come to another replica, if both live."""
        if self.replicas.get(replica.name) is not replica or served not in replica.running:
            return
        target = self.replicas.get(name)
        if target is None or target is replica or name not in self.dispatcher.names:
            return
        replica.running.remove(served)
        served.remaining = served.ends_at - self.now
        served.num_moves += 1
        self.most_moves = max(self.most_moves, served.num_moves)
        self.dispatcher.move(served.assignment, name)
        target.queue.appendleft(served)
        self._seat(target)
        self._seat(replica)

    def _has_ended(self, replica: ToyReplica, served: Served) -> None:
        is_there = self.replicas.get(replica.name) is replica and served in replica.running
        if is_there and served.ends_at <= self.now:
            replica.running.remove(served)
            served.assignment.has_ended()
            self.ends[served.request.request_id] = "served"
            self._seat(replica)

    def _report(self, name: str) -> None:
        if name in self._silent:
            return
        reported = self.replicas[name].report(), self.now
        self._tell(lambda: self.dispatcher.on_report(name, lambda: reported))

    def _tell(self, notice: Callable[[], object]) -> None:
        if self._delay and self.now:  # the first replicas are known from the start
            self.at(self.now + self._delay, notice)
        else:
            notice()
