"""Rules of the contract of autoscalers: growth, bounds, flapping, price, and what it costs.

The first are shown by a scaled toy fleet, the others by views of a fleet that does not change.
"""

from functools import partial
from itertools import pairwise
from typing import Any

from aioserve.fleet.routing import FleetView, ReplicaView, RoutedRequest, load_autoscaler
from aioserve.testing import hash_order
from aioserve.testing.autoscalers.toy_fleet import (
    Answer,
    AutoscalerSubject,
    ScaledToyFleet,
    ToyPlan,
)
from aioserve.testing.cost import MANY, Lines, count_lines, kept, most_often, size_of
from aioserve.testing.side_effects import watched_calls
from aioserve.testing.violation import RouterViolation

#: A request is late whose first token comes after this many seconds.
LATE = 10.0
#: Share of requests that may be late once a fleet has had time to grow.
MOST_LATE = 0.05
#: Changes of direction, from more replicas to fewer or back, in an hour of steady load.
MOST_TURNS = 90
#: Share of what a fleet costs that never shrinks, where two thirds of the time it has little to do.
MOST_PAID = 0.6
HOUR = 3600


def check_answers(subject: AutoscalerSubject) -> None:
    """Each answer is a whole number of at least 0, also where no replica serves."""
    deaths = tuple(range(300, 320))
    run = subject.fleet(_wave, ToyPlan(deaths=deaths)).run(1200)
    run.answers += subject.fleet(lambda now: 2.0, ToyPlan(max_replicas=1)).run(60).answers
    for answer in run.answers:
        if not isinstance(answer.said, int) or isinstance(answer.said, bool) or answer.said < 0:
            raise RouterViolation(
                f"{subject.name}: decide() must return a whole number of replicas, at least 0; at "
                f"{answer.when:g} s it returned {answer.said!r:.100}"
            )


def check_same_again(subject: AutoscalerSubject) -> None:
    """Equal calls in equal order give equal answers."""
    one, other = (_unruly(subject) for _ in range(2))
    for first, second in zip(one.answers, other.answers, strict=True):
        if first != second:
            raise RouterViolation(
                f"{subject.name}: the same events gave another answer at {first.when:g} s: "
                f"{second.said} instead of {first.said}; chance is self.rng, time is self.clock()"
            )


def check_foreign_calls(subject: AutoscalerSubject) -> None:
    """No clock, dice or sleep but the autoscaler's own."""
    with watched_calls(subject.kind, lambda: subject.name, "autoscaler"):
        _unruly(subject)


def check_hash_order(subject: AutoscalerSubject) -> None:
    """The same events give the same answers where strings have other hashes."""
    hash_order.check_answers_alike(subject.kind, subject.options, "autoscaler", __name__)


def answers_of(spec: str, options: dict[str, Any]) -> list[Any]:
    """Return what the autoscaler that `spec` names answers, while replicas die and come."""
    return _unruly(AutoscalerSubject(load_autoscaler(spec), options)).said()


def check_growth(subject: AutoscalerSubject) -> None:
    """A fleet whose load grows fourfold serves it in time, a few minutes later."""
    plan = ToyPlan(max_replicas=12)
    run = subject.fleet(lambda now: 1.0 if now < 300 else 4.0, plan).run(1500)
    _check_late(subject, run, 600, "five minutes after the load has grown from 1 replica's to 4's")


def check_bounds(subject: AutoscalerSubject) -> None:
    """An overloaded fleet stands at its most, and one without load at its least."""
    plan = ToyPlan(max_replicas=6, min_replicas=2)
    run = subject.fleet(lambda now: 8.0 if 60 <= now < 660 else 0.0, plan).run(2400)
    for answer in run.answers:
        if 360 <= answer.when < 660 and answer.wanted < 6:
            raise _at(subject, answer, "with 8 replicas' load on at most 6, it must want 6")
    last = run.answers[-1]
    if last.wanted > 2:
        raise _at(subject, last, "the load ended at 660 s, and the least is 2")


def check_steady(subject: AutoscalerSubject) -> None:
    """A steady load does not make the number of replicas go up and down."""
    run = subject.fleet(lambda now: 4.5, ToyPlan(max_replicas=20)).run(600 + HOUR)
    _check_turns(subject, run, "of a steady load of 4.5 replicas")
    _check_late(subject, run, 600, "under a steady load of 4.5 replicas")


def check_old_knowledge(subject: AutoscalerSubject) -> None:
    """What replicas report is 15 s old when the autoscaler is asked."""
    run = subject.fleet(lambda now: 4.5, ToyPlan(max_replicas=20, delay=15)).run(600 + HOUR)
    _check_turns(subject, run, "of a steady load, with reports that are 15 s old")
    _check_late(subject, run, 600, "with reports that are 15 s old")


def check_missing_knowledge(subject: AutoscalerSubject) -> None:
    """Replicas that report nothing are no reason to stop them."""
    run = subject.fleet(lambda now: 4.5, ToyPlan(max_replicas=20, is_silent=True)).run(600 + HOUR)
    _check_turns(subject, run, "of a steady load, with replicas that report nothing")
    _check_late(subject, run, 600, "with replicas that report nothing")


def check_deaths(subject: AutoscalerSubject) -> None:
    """The fullest replica dies three times under load, and is replaced."""
    plan = ToyPlan(max_replicas=12, deaths=(600, 700, 800))
    run = subject.fleet(lambda now: 3.5, plan).run(1500)
    _check_late(subject, run, 600, "where replicas died at 600, 700 and 800 s")


def check_price(subject: AutoscalerSubject) -> None:
    """A fleet that has little to do for two thirds of the time is not paid for as if it had."""
    plan, seconds = ToyPlan(max_replicas=12), 2 * HOUR
    run = subject.fleet(_wave, plan).run(seconds)
    share = run.replica_seconds / (plan.max_replicas * seconds)
    if share > MOST_PAID:
        raise RouterViolation(
            f"{subject.name}: {run.replica_seconds / HOUR:.1f} replica-hours are paid for in "
            f"{seconds / HOUR:g} hours, of which two thirds have the load of a replica: that is "
            f"{share:.0%} of {plan.max_replicas} replicas all the time, and {MOST_PAID:.0%} may be"
        )


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


# What an autoscaler answers about a fleet that does not change, and what an answer costs. Makes its
# views by hand. Knows no toy fleet.


STARTUP, INTERVAL = 60.0, 5.0  # seconds
MOST = 40  # replicas
#: The most that the same load may have as an answer while replicas start, by the first answer.
MOST_TIMES = 2
SIZES = 100, 1000  # replicas
#: Lines of Python for the second size, by those for the first.
MOST_LINES_TIMES = 20
MOST_LINES = 60  # lines of a decision, per replica of the larger fleet
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


def check_startup(subject: AutoscalerSubject) -> None:
    """The same load is no reason for more replicas while those that were asked for start, nor for
    fewer.
    """
    fleet, first = _Frozen(subject), 0
    for number in range(int(STARTUP / INTERVAL)):
        fleet.serve(8, seconds=2.0)
        wanted = fleet.ask()
        first = first or wanted
        if wanted > MOST_TIMES * first:
            raise RouterViolation(
                f"{subject.name}: two full replicas have {first} as the first answer and {wanted} "
                f"{INTERVAL * number:g} s later, while {first - 2} start: the load is the same, "
                f"and {MOST_TIMES} times the first answer is allowed; does it count "
                "fleet.num_starting?"
            )
        if wanted < min(first, fleet.num_replicas + fleet.num_starting):
            raise RouterViolation(
                f"{subject.name}: two full replicas have {first} as the first answer and {wanted} "
                f"{INTERVAL * number:g} s later, while {fleet.num_starting} start: that stops a "
                "full replica before another serves"
            )


def check_cost(subject: AutoscalerSubject) -> None:
    """The lines that an answer runs grow with the number of replicas at most."""
    few, many = (_count(subject, size) for size in SIZES)
    times, per_replica = many.total() / max(few.total(), SIZES[0]), many.total() / SIZES[1]
    if times <= MOST_LINES_TIMES and per_replica <= MOST_LINES:
        return
    raise RouterViolation(
        f"{subject.name}: an answer runs {many.total():,} lines with {SIZES[1]:,} replicas and "
        f"{few.total():,} with {SIZES[0]}: at most {MOST_LINES_TIMES} times as many and "
        f"{MOST_LINES} a replica are allowed; {most_often(many)}"
    )


def check_memory(subject: AutoscalerSubject) -> None:
    """What is kept of requests and questions has a bound."""
    fleet = _Frozen(subject)
    for name, (before, after) in kept(partial(_serve, fleet)).items():
        raise RouterViolation(
            f"{subject.name}: self.{name} grows with requests that have ended: it takes {before:,} "
            f"bytes before and {after:,} after {MANY:,} of them; what is kept of requests needs a "
            "bound, of 10,000 at most"
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
    held, shared = vars(fleet.autoscaler), {"options", "clock", "rng"}
    theirs = {id(held[name]) for name in shared} | {id(fleet.autoscaler), id(held)}
    own = {name: value for name, value in held.items() if name not in shared}
    return {name: size_of(value, theirs) for name, value in own.items()}
