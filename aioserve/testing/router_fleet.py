"""A small fleet behind a router under test, on a clock of its own, and traffic for it.

Arrivals, deaths, returns and stale knowledge; replicas take time and hold blocks, and compute
nothing.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

import msgspec

from aioserve.fleet.routing import (
    MAX_WAIT_SECONDS,
    MIN_WAIT_SECONDS,
    Assignment,
    BaseRouter,
    Dispatcher,
    Hold,
    Refuse,
    ReplicaReport,
    RoutedRequest,
    Wait,
)
from aioserve.kv_cache.block_pool import BlockRemoved, BlockStored, KVEvent
from aioserve.request import Hints

NUM_SEATS = 8
NUM_BLOCKS = 400
SECONDS_PER_TOKEN = 0.001  # of a prompt that is not cached
SECONDS_PER_REPLY = 0.4
OUTPUT_TOKENS = 40  # of each reply


class Served:
    """A request that a replica serves, and how much of it is left."""

    __slots__ = ("assignment", "ends_at", "num_moves", "remaining", "request", "started_at")

    def __init__(self, request: RoutedRequest, assignment: Assignment) -> None:
        self.request = request
        self.assignment = assignment
        self.started_at = -1.0  # time of its first token, once it has a seat
        self.ends_at = -1.0
        self.num_moves = 0  # to other replicas
        self.remaining: float | None = None  # seconds of its reply, if it came from elsewhere


class ToyReplica:
    """A replica that serves a prompt in proportion to what is not cached, then a reply, in a seat
    each.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: list[Served] = []
        self.queue: deque[Served] = deque()
        self.blocks: dict[bytes, None] = {}  # oldest first

    @property
    def num_requests(self) -> int:
        """How many requests run or wait at the replica."""
        return len(self.running) + len(self.queue)

    def seat(self, now: float) -> Iterator[KVEvent]:
        """Give free seats to requests that wait, and yield the events of the cache."""
        while self.queue and len(self.running) < NUM_SEATS:
            served = self.queue.popleft()
            request = served.request
            if served.remaining is not None:
                served.ends_at = now + served.remaining
                self.running.append(served)
                yield from self._hold(request.block_hashes)
                continue
            hashes = request.block_hashes
            num_cached = next(
                (i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes)
            )
            tokens = request.num_tokens - num_cached * request.block_size
            served.started_at = now + SECONDS_PER_TOKEN * max(tokens, 1)
            served.ends_at = served.started_at + SECONDS_PER_REPLY
            self.running.append(served)
            yield from self._hold(hashes)

    def report(self) -> ReplicaReport:
        """Return the report of the replica."""
        num_tokens = sum(served.request.num_tokens for served in self.running)
        return ReplicaReport(
            num_running=len(self.running),
            num_waiting=len(self.queue),
            num_waiting_tokens=sum(served.request.num_tokens for served in self.queue),
            max_num_seqs=NUM_SEATS,
            num_kv_tokens=16 * NUM_BLOCKS,
            num_free_kv_tokens=max(16 * NUM_BLOCKS - num_tokens, 0),
            step_seconds=0.01 + 0.002 * len(self.running),
            step_base_seconds=0.01,
            step_request_seconds=0.002,
            num_evictable_kv_tokens=max(16 * len(self.blocks) - num_tokens, 0),
            adapters=tuple(sorted({served.request.adapter for served in self.running} - {""})),
        )

    def _hold(self, hashes: Sequence[bytes]) -> Iterator[KVEvent]:
        for block_hash in hashes:
            if block_hash in self.blocks:
                continue
            if len(self.blocks) >= NUM_BLOCKS:
                oldest = next(iter(self.blocks))
                del self.blocks[oldest]
                yield BlockRemoved(oldest)
            self.blocks[block_hash] = None
            yield BlockStored(block_hash, None, [])


# A small fleet behind a router, on a clock of its own: arrivals, deaths, returns, stale knowledge.
# Notes every decision. Knows no rule. Times are in seconds.


COPY_SECONDS = 0.02  # of the KV blocks of a request to another replica


class Decision(NamedTuple):
    """The answer of the router about a request."""

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
        self._timed: set[str] = set()  # requests whose end of time in line is planned
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
        self._tell(self.dispatcher.ask_held)

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
        """Return the answers in order, in words."""
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
        elif isinstance(answer, Hold):
            self._hold(request, self.now if since is None else since)
        elif isinstance(answer, Refuse):
            self.ends[request.request_id] = "refused"
        else:  # none is there
            self.ends[request.request_id] = "failed"

    def _hold(self, request: RoutedRequest, since: float) -> None:
        """Ask again when something has changed at a replica; at the end of its time it has
        waited in vain.
        """
        again = partial(self._send, request, frozenset(), since)
        self.dispatcher.hold(request, again)
        if request.request_id not in self._timed:
            self._timed.add(request.request_id)
            self.at(since + MAX_WAIT_SECONDS, partial(self._give_up, request))

    def _give_up(self, request: RoutedRequest) -> None:
        if self.dispatcher.drop(request.request_id):
            self.ends[request.request_id] = "waited"

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
            self.dispatcher.ask_held()
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
            served.assignment.has_ended(OUTPUT_TOKENS)
            self.ends[served.request.request_id] = "served"
            self._seat(replica)
            self.dispatcher.ask_held()

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


# Requests at random for a toy fleet, the same in every run. Knows prompts, sessions and hints.
# Knows no replica.


BLOCK_SIZE = 16
#: Requests per second and replica that fill most of its seats.
FULL = 13.0


def prompt(*names: int | str) -> tuple[bytes, ...]:
    """Return a block of a prompt for each name; what follows another beginning is another block."""
    return tuple(repr(names[: i + 1]).encode() for i in range(len(names)))


def equal_requests(count: int, rate: float) -> Iterator[tuple[float, RoutedRequest]]:
    """Yield requests with nothing in common and nothing that sets one apart, at `rate` per
    second.
    """
    rng, now = random.Random("equal"), 1.0
    for number in range(count):
        now += rng.expovariate(rate)
        yield now, _request(number, prompt(*(f"{number}.{i}" for i in range(8))))


def one_beginning(count: int, rate: float) -> Iterator[tuple[float, RoutedRequest]]:
    """Yield requests of which all prompts begin alike, for the greater part."""
    rng, now = random.Random("hot"), 1.0
    for number in range(count):
        now += rng.expovariate(rate)
        yield now, _request(number, prompt(*range(6), f"{number}.6", f"{number}.7"))


def conversations(count: int, rate: float, seed: int = 0) -> Iterator[tuple[float, RoutedRequest]]:
    """Turns of conversations of all kinds: clients, priorities, deadlines, classes, lengths."""
    rng, now = random.Random(f"{seed} conversations"), 1.0
    turns: dict[int, int] = {}
    for number in range(count):
        now += rng.expovariate(rate)
        session = rng.randrange(max(count // 6, 1))
        turn = turns[session] = turns.get(session, 0) + 1
        hints: Hints = {"session": f"s{session}", "slo_class": rng.choice(["chat", "batch", "x"])}
        if rng.random() < 0.5:
            hints |= {"predicted_output_tokens": rng.randrange(1, 400), "slo_ttft": rng.random()}
            hints |= {"slo_tpot": 0.2 * rng.random()}
        yield (
            now,
            _request(
                number,
                prompt(session % 5, *(f"{session}.{i}" for i in range(2 * turn))),
                session=f"s{session}" if rng.random() < 0.8 else "",
                user=f"u{session % 7}",
                priority=rng.randrange(-1, 3),
                deadline=now + 30 * rng.random() if rng.random() < 0.2 else None,
                hints=hints,
                adapter=rng.choice(["", "", "a", "b"]),
            ),
        )


def _request(number: int, hashes: tuple[bytes, ...], **fields: object) -> RoutedRequest:
    return RoutedRequest(
        request_id=f"q{number}",
        num_tokens=BLOCK_SIZE * len(hashes) + number % BLOCK_SIZE,
        max_tokens=256,
        block_hashes=hashes,
        block_size=BLOCK_SIZE,
        **fields,  # type: ignore[arg-type]
    )


# The router that is under test, with its options. Knows how it is made. Knows no rule.


@dataclass(frozen=True)
class RouterSubject:
    """A router that the contract runs on, with its options."""

    router: type[BaseRouter]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> type[BaseRouter]:
        """The class that a violation blames."""
        return self.router

    @property
    def name(self) -> str:
        """The name by which messages call the router."""
        return self.router.__name__

    def fleet(self, num_replicas: int, **how: Any) -> ToyFleet:
        """Return a new fleet behind a new router; `how` is what `ToyFleet` takes besides."""
        return ToyFleet(self.router, self.options, num_replicas, **how)
