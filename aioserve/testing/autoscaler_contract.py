"""The contract of autoscalers as tests that run on any autoscaler.

In a suite of your own:

    class TestMine(AutoscalerContract):
        autoscaler = MyAutoscaler

From a command line, without a file: `pytest --aioserve-autoscaler mine.py:Mine`.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import msgspec

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the contract of autoscalers needs pytest: pip install pytest hypothesis"
    ) from error

from aioserve.fleet.routing import (
    AutoscalerInterface,
    FleetView,
    ReplicaReport,
    ReplicaView,
    RoutedRequest,
    blamed,
    load_autoscaler,
)
from aioserve.testing.comparisons import check_answers_alike
from aioserve.testing.cost import MANY, Lines, check_fleet_cost, count_lines, kept, sizes_of_own
from aioserve.testing.side_effects import watched_calls
from aioserve.testing.violation import RouterViolation

__all__ = ["AutoscalerContract", "AutoscalerSubject"]

#: A request is late whose first token comes after this many seconds.
LATE = 10.0
#: Share of requests that may be late once a fleet has had time to grow.
MOST_LATE = 0.05
#: Changes of direction, from more replicas to fewer or back, in an hour of steady load.
MOST_TURNS = 90
#: Share of what a fleet costs that never shrinks, where two thirds of the time it has little to do.
MOST_PAID = 0.6
HOUR = 3600


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

    def fleet(self, load: Callable[[float], float], plan: "ToyPlan") -> "ScaledToyFleet":
        """Return a new fleet with a new autoscaler; `load` is how many replicas would be kept full
        at a time in seconds.
        """
        return ScaledToyFleet(self.autoscaler, self.options, load, plan)


class AutoscalerContract:
    """Derive a class `Test...` that sets `autoscaler`, and `options` if it needs some."""

    autoscaler: ClassVar[type[AutoscalerInterface]]
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def subject(self) -> AutoscalerSubject:
        """What is tested; the pytest plugin puts the autoscalers of the command line here."""
        return AutoscalerSubject(self.autoscaler, self.options)

    def test_answers_are_whole_numbers(self, subject: AutoscalerSubject) -> None:
        """Each answer is a whole number of at least 0, also where no replica serves."""
        deaths = tuple(range(300, 320))
        run = subject.fleet(_wave, ToyPlan(deaths=deaths)).run(1200)
        run.answers += subject.fleet(lambda now: 2.0, ToyPlan(max_replicas=1)).run(60).answers
        for answer in run.answers:
            if not isinstance(answer.said, int) or isinstance(answer.said, bool) or answer.said < 0:
                raise RouterViolation(
                    f"{subject.name}: decide() must return a whole number of replicas, at least "
                    f"0; at {answer.when:g} s it returned {answer.said!r:.100}"
                )

    def test_time_and_chance_are_its_own(self, subject: AutoscalerSubject) -> None:
        """Its code calls no clock and no dice of the process, and does not sleep."""
        with watched_calls(subject.kind, lambda: subject.name, "autoscaler"):
            _unruly(subject)

    def test_equal_calls_give_equal_answers(self, subject: AutoscalerSubject) -> None:
        """The same calls are made twice, while replicas die and start."""
        one, other = (_unruly(subject) for _ in range(2))
        for first, second in zip(one.answers, other.answers, strict=True):
            if first != second:
                raise RouterViolation(
                    f"{subject.name}: the same events gave another answer at {first.when:g} s: "
                    f"{second.said} instead of {first.said}; chance is self.rng, time is "
                    "self.clock()"
                )

    def test_answers_do_not_depend_on_hashes_of_strings(self, subject: AutoscalerSubject) -> None:
        """The same calls are made in two processes with different seeds of hashes."""
        check_answers_alike(subject.kind, subject.options, "autoscaler", __name__)

    def test_a_start_takes_its_time(self, subject: AutoscalerSubject) -> None:
        """The same load has about the same answer while replicas start."""
        fleet, first = _Frozen(subject), 0
        for number in range(int(STARTUP / INTERVAL)):
            fleet.serve(8, seconds=2.0)
            wanted = fleet.ask()
            first = first or wanted
            if wanted > MOST_TIMES * first:
                raise RouterViolation(
                    f"{subject.name}: two full replicas have {first} as the first answer and "
                    f"{wanted} {INTERVAL * number:g} s later, while {first - 2} start: the load "
                    f"is the same, and {MOST_TIMES} times the first answer is allowed; does it "
                    "count fleet.num_starting?"
                )
            if wanted < min(first, fleet.num_replicas + fleet.num_starting):
                raise RouterViolation(
                    f"{subject.name}: two full replicas have {first} as the first answer and "
                    f"{wanted} {INTERVAL * number:g} s later, while {fleet.num_starting} start: "
                    "that stops a full replica before another serves"
                )

    def test_a_fleet_grows_with_its_load(self, subject: AutoscalerSubject) -> None:
        """Few requests are late, minutes after the load has grown fourfold."""
        plan = ToyPlan(max_replicas=12)
        run = subject.fleet(lambda now: 1.0 if now < 300 else 4.0, plan).run(1500)
        _check_late(
            subject, run, 600, "five minutes after the load has grown from 1 replica's to 4's"
        )

    def test_a_fleet_stands_at_its_bounds(self, subject: AutoscalerSubject) -> None:
        """An overloaded fleet stands at its most, and an idle one comes down to its least."""
        plan = ToyPlan(max_replicas=6, min_replicas=2)
        run = subject.fleet(lambda now: 8.0 if 60 <= now < 660 else 0.0, plan).run(2400)
        for answer in run.answers:
            if 360 <= answer.when < 660 and answer.wanted < 6:
                raise _at(subject, answer, "with 8 replicas' load on at most 6, it must want 6")
        last = run.answers[-1]
        if last.wanted > 2:
            raise _at(subject, last, "the load ended at 660 s, and the least is 2")

    def test_a_steady_load_makes_it_flap_within_the_bound(self, subject: AutoscalerSubject) -> None:
        """The number of replicas changes its direction a bounded number of times in an hour."""
        run = subject.fleet(lambda now: 4.5, ToyPlan(max_replicas=20)).run(600 + HOUR)
        _check_turns(subject, run, "of a steady load of 4.5 replicas")
        _check_late(subject, run, 600, "under a steady load of 4.5 replicas")

    def test_old_knowledge_makes_it_flap_within_the_bound(self, subject: AutoscalerSubject) -> None:
        """What replicas report is 15 s old."""
        run = subject.fleet(lambda now: 4.5, ToyPlan(max_replicas=20, delay=15)).run(600 + HOUR)
        _check_turns(subject, run, "of a steady load, with reports that are 15 s old")
        _check_late(subject, run, 600, "with reports that are 15 s old")

    def test_replicas_that_report_nothing_are_kept(self, subject: AutoscalerSubject) -> None:
        """Replicas report nothing, and requests are served in time all the same."""
        run = subject.fleet(lambda now: 4.5, ToyPlan(max_replicas=20, is_silent=True)).run(
            600 + HOUR
        )
        _check_turns(subject, run, "of a steady load, with replicas that report nothing")
        _check_late(subject, run, 600, "with replicas that report nothing")

    def test_replicas_that_die_are_replaced(self, subject: AutoscalerSubject) -> None:
        """The fullest replica dies three times under load, and few requests are late."""
        plan = ToyPlan(max_replicas=12, deaths=(600, 700, 800))
        run = subject.fleet(lambda now: 3.5, plan).run(1500)
        _check_late(subject, run, 600, "where replicas died at 600, 700 and 800 s")

    def test_an_idle_fleet_is_not_paid_for(self, subject: AutoscalerSubject) -> None:
        """Replica-hours follow a load that comes and goes."""
        plan, seconds = ToyPlan(max_replicas=12), 2 * HOUR
        run = subject.fleet(_wave, plan).run(seconds)
        share = run.replica_seconds / (plan.max_replicas * seconds)
        if share > MOST_PAID:
            raise RouterViolation(
                f"{subject.name}: {run.replica_seconds / HOUR:.1f} replica-hours are paid for in "
                f"{seconds / HOUR:g} hours, of which two thirds have the load of a replica: that "
                f"is {share:.0%} of {plan.max_replicas} replicas all the time, and "
                f"{MOST_PAID:.0%} may be"
            )

    def test_an_answer_costs_in_proportion(self, subject: AutoscalerSubject) -> None:
        """The lines that an answer runs grow with the number of replicas at most, up to 1,000."""
        check_fleet_cost(subject.name, "an answer", partial(_count, subject))

    def test_memory_does_not_grow(self, subject: AutoscalerSubject) -> None:
        """Requests that have ended leave nothing behind in the autoscaler."""
        fleet = _Frozen(subject)
        for name, (before, after) in kept(partial(_serve, fleet)).items():
            raise RouterViolation(
                f"{subject.name}: self.{name} grows with requests that have ended: it takes "
                f"{before:,} bytes before and {after:,} after {MANY:,} of them; what is kept of "
                "requests needs a bound, of 10,000 at most"
            )


class TestGivenAutoscalers(AutoscalerContract):
    """The autoscalers of the command line."""


# A fleet that the autoscaler scales, on a clock of its own: starts take time and are paid for.
# Times are in seconds, and whole.


NUM_SEATS = 8
SERVICE_SECONDS = 10  # that a request keeps its seat
PROMPT_TOKENS = 2048
KV_TOKENS = 10 * PROMPT_TOKENS
#: Seconds to a first token beside `n` requests that run: FIRST_TOKEN * (1 + n).
FIRST_TOKEN = 0.09
#: Requests per second that keep all seats of a replica taken.
FULL = NUM_SEATS / SERVICE_SECONDS


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


# What the tests share that scale it.


def answers_of(spec: str, options: dict[str, Any]) -> list[Any]:
    """Return what the autoscaler that `spec` names answers, while replicas die and come."""
    return _unruly(AutoscalerSubject(load_autoscaler(spec), options)).said()


def _wave(now: float) -> float:
    return 6.0 if now % 1800 < 600 else 0.8


def _unruly(subject: AutoscalerSubject) -> ScaledToyFleet:
    plan = ToyPlan(max_replicas=12, delay=5, deaths=(400, 401, 405, 700))
    return subject.fleet(_wave, plan).run(1000)


def _check_late(subject: AutoscalerSubject, run: ScaledToyFleet, since: float, where: str) -> None:
    waits = [seconds for arrival, seconds in run.waits if arrival >= since]
    waits += [run.now - arrival for arrival in run.waiting_since() if arrival >= since]
    late = sum(seconds > LATE for seconds in waits)
    if late > MOST_LATE * max(len(waits), 1):
        fewest = min((answer for answer in run.answers if answer.when >= since), key=_wanted)
        raise RouterViolation(
            f"{subject.name}: {late} of {len(waits)} requests have their first token after more "
            f"than {LATE:g} s, {where}; {MOST_LATE:.0%} may be late. At {fewest.when:g} s it wants "
            f"{fewest.wanted} replicas, with {fewest.num_queued} requests in queues"
        )


def _check_turns(subject: AutoscalerSubject, run: ScaledToyFleet, where: str) -> None:
    steps = [
        (later.when, later.wanted - earlier.wanted)
        for earlier, later in pairwise(run.answers)
        if later.when >= 600 and later.wanted != earlier.wanted
    ]
    turns = [when for (_, one), (when, other) in pairwise(steps) if (one > 0) != (other > 0)]
    if len(turns) > MOST_TURNS:
        raise RouterViolation(
            f"{subject.name}: the number of replicas changes its direction {len(turns)} times in "
            f"an hour {where}, first at {turns[0]:g} and {turns[1]:g} s; {MOST_TURNS} times are "
            "allowed: self.steady() keeps replicas that were wanted a short time ago"
        )


def _wanted(answer: Answer) -> int:
    return answer.wanted


def _at(subject: AutoscalerSubject, answer: Answer, what: str) -> RouterViolation:
    return RouterViolation(
        f"{subject.name}: at {answer.when:g} s it wants {answer.wanted} replicas, with "
        f"{answer.num_serving} that serve, {answer.num_starting} that start and "
        f"{answer.num_queued} requests in queues: {what}"
    )


# Views of a fleet that does not change, made by hand: what is answered about it, what that costs.


STARTUP, INTERVAL = 60.0, 5.0  # seconds
MOST = 40  # replicas
#: The most that the same load may have as an answer while replicas start, by the first answer.
MOST_TIMES = 2
REST_SECONDS = 3600.0  # between waves of requests: what is kept for a time may go


class _Frozen:
    """Two full replicas, or more, at which nothing changes but the time and what starts."""

    def __init__(self, subject: AutoscalerSubject, num_replicas: int = 2) -> None:
        self.now = 100.0
        self.num_starting = 0
        self.num_replicas = num_replicas
        self.autoscaler = subject.kind(dict(subject.options), clock=lambda: self.now)

    def ask(self, most: int = MOST) -> int:
        """Return one question, and what it leads to."""
        view = self.view(most)
        said = self.autoscaler.decide(view)
        wanted = min(max(said, view.min_replicas), most)
        self.num_starting = max(wanted - self.num_replicas, self.num_starting)
        self.now += INTERVAL
        return wanted

    def serve(self, count: int, seconds: float) -> None:
        """First tokens of `count` requests, each after `seconds`."""
        for number in range(count):
            request = RoutedRequest(
                request_id=f"q{self.now}.{number}", num_tokens=2048, session=f"s{number}"
            )
            self.autoscaler.on_first_token(request, seconds + number / 1e6)

    def view(self, most: int) -> FleetView:
        """Return the fleet, of which there may be `most` replicas."""
        replicas = tuple(
            ReplicaView(
                f"r{number}",
                work=30_000.0,
                num_sent=12,
                num_unstarted_tokens=8192,
                known_at=self.now,
                num_running=8,
                num_waiting=4,
                num_waiting_tokens=8192,
                max_num_seqs=8,
                num_kv_tokens=20_480,
                num_free_kv_tokens=4096,
                step_seconds=0.03,
            )
            for number in range(self.num_replicas)
        )
        return FleetView(
            replicas=replicas,
            num_starting=self.num_starting,
            min_replicas=1,
            max_replicas=most,
            startup_seconds=STARTUP,
            interval=INTERVAL,
            num_arrived=8,
            num_arrived_tokens=16_384,
        )


def _count(subject: AutoscalerSubject, num_replicas: int) -> Lines:
    fleet, lines = _Frozen(subject, num_replicas), Lines()
    fleet.serve(500, seconds=0.5)
    count_lines(partial(fleet.autoscaler.decide, fleet.view(2 * num_replicas)), lines, (__name__,))
    return lines


def _serve(fleet: _Frozen, count: int) -> dict[str, int]:
    """Serve `count` requests with a question for every ten; bytes behind each attribute."""
    for _ in range(count // 10):
        fleet.serve(10, seconds=0.5)
        fleet.ask()
    fleet.now += REST_SECONDS
    fleet.ask()
    return sizes_of_own(fleet.autoscaler, {"options", "clock", "rng"})
