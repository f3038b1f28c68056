"""A fleet that an autoscaler under test scales, on a clock of its own: starts take time."""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from aioserve.fleet.routing import (
    AutoscalerInterface,
    FleetView,
    ReplicaReport,
    ReplicaView,
    RoutedRequest,
    blamed,
)

NUM_SEATS = 8
SERVICE_SECONDS = 10  # that a request keeps its seat
PROMPT_TOKENS = 2048
KV_TOKENS = 10 * PROMPT_TOKENS
#: Seconds to a first token beside `n` requests that run: FIRST_TOKEN * (1 + n).
FIRST_TOKEN = 0.09


class Held:
    """A request that a replica serves, and when it ends."""

    __slots__ = ("ends_at", "request")

    def __init__(self, request: RoutedRequest) -> None:
        self.request = request
        self.ends_at = 0.0


class ScaledReplica:
    """A replica that serves requests in the order in which they come, each in a seat."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: list[Held] = []
        self.queue: deque[RoutedRequest] = deque()
        self.is_leaving = False

    @property
    def num_requests(self) -> int:
        """How many requests run or wait at the replica."""
        return len(self.running) + len(self.queue)

    def tick(self, now: float) -> list[tuple[RoutedRequest, float]]:
        """End what is due and seat what waits; first tokens, each with the seconds since the
        request arrived.
        """
        self.running = [held for held in self.running if held.ends_at > now]
        started = []
        while self.queue and len(self.running) < NUM_SEATS:
            held = Held(self.queue.popleft())
            held.ends_at = now + SERVICE_SECONDS
            seconds = now - held.request.arrival_time + FIRST_TOKEN * (1 + len(self.running))
            self.running.append(held)
            started.append((held.request, seconds))
        return started

    def report(self) -> ReplicaReport:
        """Return the report of the replica."""
        held = sum(each.request.num_tokens for each in self.running)
        return ReplicaReport(
            num_running=len(self.running),
            num_waiting=len(self.queue),
            num_waiting_tokens=PROMPT_TOKENS * len(self.queue),
            max_num_seqs=NUM_SEATS,
            num_kv_tokens=KV_TOKENS,
            num_free_kv_tokens=max(KV_TOKENS - held, 0),
            step_seconds=0.02 + 0.002 * len(self.running),
        )


# A fleet that an autoscaler scales, on a clock of its own: starts take time and are paid for. Notes
# every answer. Knows no rule. Times are in seconds, and whole.


#: Requests per second that keep all seats of a replica taken.
FULL = NUM_SEATS / SERVICE_SECONDS


class ToyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet in which the autoscaler is tried."""

    max_replicas: int = 10
    min_replicas: int = 1
    startup_seconds: int = 20
    interval: int = 5  # from one question to the next
    delay: int = 0  # seconds after which reports are known
    is_silent: bool = False  # nothing is reported
    deaths: tuple[int, ...] = ()  # times at which the fullest replica dies
    seed: int = 0


class Answer(NamedTuple):
    """The answer of the autoscaler, and what there was."""

    when: float
    num_serving: int
    num_starting: int
    said: Any
    wanted: int  # what was said, within the least and the most
    num_queued: int


class ScaledToyFleet:
    """Replicas behind a router that sends each request where the fewest are."""

    def __init__(
        self,
        kind: type[AutoscalerInterface],
        options: Mapping[str, Any],
        load: Callable[[float], float],
        plan: ToyPlan,
    ) -> None:
        self.now = 0.0
        self.plan = plan
        self.answers: list[Answer] = []
        self.waits: list[tuple[float, float]] = []  # arrival and seconds to the first token
        self.replica_seconds = 0.0  # that are paid for
        self._load = load
        self._rng = random.Random(f"{plan.seed} scaled")
        self._next = self._rng.expovariate(1.0)  # arrivals are counted until this
        self._counted = 0.0
        self._num_made = self._num_requests = self._num_arrived = 0
        self._serving: list[ScaledReplica] = []
        self._starting: list[float] = []  # times at which they serve
        self._parked: list[RoutedRequest] = []  # no replica serves
        self._reports: dict[str, deque[tuple[ReplicaReport, float]]] = {}
        with blamed(kind, "__init__()"):
            self._autoscaler = kind(dict(options), seed=plan.seed, clock=lambda: self.now)
        self._kind = kind
        for _ in range(plan.min_replicas):
            self._serve()

    @property
    def num_replicas(self) -> int:
        """Replicas that take requests, or start."""
        return len(self._taking()) + len(self._starting)

    def run(self, seconds: int) -> "ScaledToyFleet":
        """Let `seconds` of the fleet's clock go by."""
        for _ in range(seconds):
            self._tick()
            self.now += 1.0
        return self

    def waiting_since(self) -> list[float]:
        """Times at which the requests arrived that have no first token."""
        queued = [request for replica in self._serving for request in replica.queue]
        return [request.arrival_time for request in [*self._parked, *queued]]

    def said(self) -> list[Any]:
        """Return the numbers of replicas that the autoscaler answered, in order."""
        return [answer.said for answer in self.answers]

    def _taking(self) -> list[ScaledReplica]:
        return [replica for replica in self._serving if not replica.is_leaving]

    def _tick(self) -> None:
        plan = self.plan
        for when in [when for when in self._starting if when <= self.now]:
            self._starting.remove(when)
            self._serve()
        if self.now in plan.deaths and self._taking():
            self._die(max(self._taking(), key=lambda replica: replica.num_requests))
        parked, self._parked = self._parked, []
        for request in [*parked, *self._arrivals()]:
            self._send(request)
        for replica in self._serving:
            for request, seconds in replica.tick(self.now):
                self.waits.append((request.arrival_time, seconds))
                with blamed(self._kind, "on_first_token()"):
                    self._autoscaler.on_first_token(request, seconds)
            self._reports[replica.name].append((replica.report(), self.now))
        self._serving = [r for r in self._serving if not r.is_leaving or r.num_requests]
        self.replica_seconds += len(self._serving) + len(self._starting)
        if self.now and self.now % plan.interval == 0:
            self._ask()

    def _arrivals(self) -> list[RoutedRequest]:
        self._counted += FULL * self._load(self.now)
        arrived = []
        while self._next <= self._counted:
            self._next += self._rng.expovariate(1.0)
            self._num_requests += 1
            arrived.append(
                RoutedRequest(
                    request_id=f"q{self._num_requests}",
                    num_tokens=PROMPT_TOKENS,
                    max_tokens=256,
                    arrival_time=self.now,
                )
            )
        self._num_arrived += len(arrived)
        return arrived

    def _send(self, request: RoutedRequest) -> None:
        taking = self._taking()
        if taking:
            min(taking, key=lambda replica: replica.num_requests).queue.append(request)
        else:
            self._parked.append(request)

    def _serve(self) -> None:
        replica = ScaledReplica(f"r{self._num_made}")
        self._num_made += 1
        self._serving.append(replica)
        self._reports[replica.name] = deque(maxlen=self.plan.delay + 1)

    def _die(self, replica: ScaledReplica) -> None:
        """Remove a replica, and send its requests again."""
        self._serving.remove(replica)
        for request in [*(held.request for held in replica.running), *replica.queue]:
            self._send(request)

    def _ask(self) -> None:
        taking, plan = self._taking(), self.plan
        fleet = FleetView(
            replicas=tuple(self._view(replica) for replica in taking),
            num_starting=len(self._starting),
            min_replicas=plan.min_replicas,
            max_replicas=plan.max_replicas,
            startup_seconds=plan.startup_seconds,
            interval=plan.interval,
            num_arrived=self._num_arrived,
            num_arrived_tokens=PROMPT_TOKENS * self._num_arrived,
        )
        self._num_arrived = 0
        with blamed(self._kind, "decide()"):
            said = self._autoscaler.decide(fleet)
        is_number = isinstance(said, int)
        wanted = min(max(said, plan.min_replicas), plan.max_replicas) if is_number else -1
        num_queued = sum(len(replica.queue) for replica in taking) + len(self._parked)
        self.answers.append(
            Answer(self.now, len(taking), len(self._starting), said, wanted, num_queued)
        )
        if is_number:
            self._scale(wanted - fleet.num_replicas, taking)

    def _scale(self, missing: int, taking: list[ScaledReplica]) -> None:
        self._starting += [self.now + self.plan.startup_seconds] * max(missing, 0)
        by_work = sorted(taking, key=lambda replica: replica.num_requests)
        for replica in by_work[: max(-missing, 0)]:
            replica.is_leaving = True

    def _view(self, replica: ScaledReplica) -> ReplicaView:
        queued, running = len(replica.queue), len(replica.running)
        work = PROMPT_TOKENS * (1.5 * queued + 0.5 * running)
        own = replica.name, work, queued + running, PROMPT_TOKENS * queued
        if self.plan.is_silent or not self._reports[replica.name]:
            return ReplicaView(*own)
        report, known_at = self._reports[replica.name][0]
        return ReplicaView(
            *own,
            known_at=known_at,
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_waiting_tokens=report.num_waiting_tokens,
            max_num_seqs=report.max_num_seqs,
            num_kv_tokens=report.num_kv_tokens,
            num_free_kv_tokens=report.num_free_kv_tokens,
            step_seconds=report.step_seconds,
        )


# The autoscaler that is under test, with its options. Knows how it is made. Knows no rule.


@dataclass(frozen=True)
class AutoscalerSubject:
    """An autoscaler that the contract runs on, with its options."""

    autoscaler: type[AutoscalerInterface]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> type[AutoscalerInterface]:
        """The class that a violation blames."""
        return self.autoscaler

    @property
    def name(self) -> str:
        """The name by which messages call the autoscaler."""
        return self.autoscaler.__name__

    def fleet(self, load: Callable[[float], float], plan: ToyPlan) -> ScaledToyFleet:
        """Return a new fleet with a new autoscaler; `load` is how many replicas would be kept full
        at a time in seconds.
        """
        return ScaledToyFleet(self.autoscaler, self.options, load, plan)
