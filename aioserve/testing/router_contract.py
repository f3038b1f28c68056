"""The contract of routers as tests that run on any router.

In a suite of your own:

    class TestMine(RouterContract):
        router = MyRouter

From a command line, without a file: `pytest --aioserve-router mine.py:Mine`.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, ClassVar

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the contract of routers needs pytest: pip install pytest hypothesis"
    ) from error

from aioserve.fleet.routing import (
    REPORTED,
    BaseRouter,
    Dispatcher,
    ReplicaReport,
    RoutedRequest,
    Wait,
    load_router,
)
from aioserve.kv_cache.block_pool import BlockStored
from aioserve.testing.comparisons import check_answers_alike
from aioserve.testing.cost import MANY, Lines, check_fleet_cost, count_lines, kept, sizes_of_own
from aioserve.testing.router_fleet import (
    BLOCK_SIZE,
    FULL,
    NUM_SEATS,
    RouterSubject,
    ToyFleet,
    conversations,
    equal_requests,
    one_beginning,
    prompt,
)
from aioserve.testing.side_effects import watched_calls
from aioserve.testing.violation import RouterViolation

__all__ = ["RouterContract", "RouterSubject"]


class RouterContract:
    """Derive a class `Test...` that sets `router`, and `options` if it needs some."""

    router: ClassVar[type[BaseRouter]]
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def subject(self) -> RouterSubject:
        """What is tested; the pytest plugin puts the routers of the command line here."""
        return RouterSubject(self.router, self.options)

    def test_it_asks_for_what_it_reads(self, subject: RouterSubject) -> None:
        """What its code reads of replicas and prefixes, `uses_reports` and `uses_prefixes` say."""
        kind = subject.kind
        names = {name for code in _own_code(kind) for name in code.co_names}
        for flag, needed in FLAGS:
            read = sorted(names & needed)
            if read and not getattr(kind, flag):
                raise RouterViolation(
                    f"{subject.name} reads {', '.join(read)}, which nothing fills without "
                    f"`{flag} = True` in the class"
                )

    def test_time_and_chance_are_its_own(self, subject: RouterSubject) -> None:
        """Its code calls no clock and no dice of the process, and does not sleep."""
        with watched_calls(subject.kind, lambda: subject.name, "router"):
            answers(subject)

    def test_equal_calls_give_equal_answers(self, subject: RouterSubject) -> None:
        """The same calls are made twice, while replicas come and go."""
        one, other = (churned(subject, seed=3) for _ in range(2))
        for first, second in zip(one.decisions, other.decisions, strict=False):
            if first != second:
                raise RouterViolation(
                    f"{subject.name}: the same events gave another answer about "
                    f"{first.request_id} at {first.when:.3f} s: {second.answer} instead of "
                    f"{first.answer}; chance is self.rng, time is self.clock()"
                )

    def test_answers_do_not_depend_on_hashes_of_strings(self, subject: RouterSubject) -> None:
        """The same calls are made in two processes with different seeds of hashes."""
        check_answers_alike(subject.kind, subject.options, "router", __name__)

    def test_it_leaves_requests_as_they_are(self, subject: RouterSubject) -> None:
        """A request and its hints are the same before and after the router has seen them."""
        traffic = list(conversations(60, FULL))
        before = [repr(request) for _, request in traffic]
        _run(subject, traffic, num_replicas=3, may_flood=True)
        for text, (_, request) in zip(before, traffic, strict=True):
            if text != repr(request):
                raise RouterViolation(f"{subject.name} has changed a request: {request!r}")

    def test_no_replica_is_starved_or_flooded(self, subject: RouterSubject) -> None:
        """Equal requests go to a full fleet, and each replica gets a share within the bound."""
        fleet = _run(subject, equal_requests(1500, FULL * NUM_REPLICAS))
        _check_starved(subject, fleet, "of equal requests")

    def test_one_beginning_floods_no_replica(self, subject: RouterSubject) -> None:
        """The prompts of all requests begin alike, which sends no crowd to one replica."""
        _run(subject, one_beginning(1500, FULL * NUM_REPLICAS))

    def test_old_knowledge_floods_no_replica(self, subject: RouterSubject) -> None:
        """What the router knows of its replicas is half a second old."""
        fleet = _run(subject, equal_requests(1500, FULL * NUM_REPLICAS), delay=0.5)
        _check_starved(subject, fleet, "with knowledge that is half a second old")

    def test_replicas_that_report_nothing_are_neither_starved_nor_flooded(
        self, subject: RouterSubject
    ) -> None:
        """Two of ten replicas report nothing; then none reports anything."""
        silent = frozenset({"r2", "r7"})
        fleet = _run(subject, equal_requests(1500, FULL * NUM_REPLICAS), silent=silent)
        _check_starved(subject, fleet, "where r2 and r7 report nothing")
        _run(subject, equal_requests(400, FULL * NUM_REPLICAS), silent=frozenset(fleet.replicas))

    def test_nothing_is_lost_when_replicas_die_and_come_back(self, subject: RouterSubject) -> None:
        """The sender notices the deaths at once; then, a second later."""
        for seed, delay in enumerate((0.0, 0.0, 0.3, 1.0)):
            fleet = churned(subject, seed, delay)
            _check_ends(subject, fleet)

    def test_requests_that_move_are_neither_lost_nor_moved_to_and_fro(
        self, subject: RouterSubject
    ) -> None:
        """Of a router that splits or migrates requests, while replicas die and come back."""
        kind = subject.kind
        if not kind.splits and kind.rebalance_seconds is None:
            return
        for roles in (ROLES, ()):
            for seed, delay in enumerate((0.0, 0.3)):
                _check_ends(subject, fleet := churned(subject, seed, delay, roles))
                if fleet.most_moves > MOST_MOVES:
                    raise RouterViolation(
                        f"{subject.name}: a request that runs for half a second has moved "
                        f"{fleet.most_moves} times; {MOST_MOVES} times are allowed"
                    )
        answers = churned(subject, 1, 0.0, ROLES).answers()
        if kind.splits and not any(" " in answer for answer in answers):
            raise RouterViolation(
                f"{subject.name}: splits is stated, and none of {len(answers)} requests to "
                "replicas for prompts and replicas for replies is split"
            )

    def test_an_idle_fleet_serves(self, subject: RouterSubject) -> None:
        """When replicas have died and come back, a fleet without load still serves a request."""
        fleet = churned(subject, seed=5)
        for number in range(6):
            asked = RoutedRequest(request_id=f"last{number}", num_tokens=32)
            fleet.arrive(fleet.now + 100.0 + number, asked)
        fleet.run()
        ends = [fleet.ends[f"last{number}"] for number in range(6)]
        if "served" not in ends:
            raise RouterViolation(
                f"{subject.name}: an idle fleet of {len(fleet.replicas)} replicas has not served "
                f"any of six requests, which came one after the other: {', '.join(ends)}"
            )

    def test_sessions_stay_if_that_is_promised(self, subject: RouterSubject) -> None:
        """A session stays at its replica while that lives and others come and go."""
        if not subject.kind.keeps_sessions:
            return
        names = [f"r{i}" for i in range(NUM_REPLICAS)]
        dispatcher = Dispatcher(subject.kind, dict(subject.options), clock=lambda: 0.0)
        for number, name in enumerate(names):
            dispatcher.join(name, number)
        sessions = [f"s{i}" for i in range(400)]
        before = _homes(subject, dispatcher, sessions)
        dispatcher.leave("r4")
        _check_kept(
            subject, before, _homes(subject, dispatcher, sessions), "r4 has gone", at_most=0.0
        )
        dispatcher.join("r4", 4)
        dispatcher.join("r10", 10)
        after = _homes(subject, dispatcher, sessions)
        _check_kept(subject, before, after, "r4 is back and r10 has come", at_most=MOST_MOVED)
        if after != (again := _homes(subject, dispatcher, sessions)):
            _check_kept(subject, after, again, "no replica came or went", at_most=0.0)

    def test_a_decision_costs_in_proportion(self, subject: RouterSubject) -> None:
        """The lines that a decision runs grow with the number of replicas at most, up to 1,000."""
        check_fleet_cost(subject.name, "a decision", partial(_count, subject))

    def test_memory_does_not_grow(self, subject: RouterSubject) -> None:
        """Requests and sessions that have ended leave nothing behind in the router."""
        waves = _Waves(subject)
        for name, (before, after) in kept(waves.serve).items():
            raise RouterViolation(
                f"{subject.name}: self.{name} grows with requests that have ended: it takes "
                f"{before:,} bytes after {waves.num_served - MANY:,} of them and {after:,} after "
                f"{waves.num_served:,}; what is kept of requests needs a bound, of 10,000 at most"
            )


class TestGivenRouters(RouterContract):
    """The routers of the command line."""


# Shares, churn, sessions, old knowledge: the bounds are those that docs/writing-a-router.md states.


#: Of equal requests to a full fleet a replica gets at least this part of its share.
LEAST_SHARE = 1 / 8
#: A replica is flooded that holds this many times its seats, while another has half of them free.
FLOOD = 4
NUM_REPLICAS = 10
#: Of sessions whose replica lives, the part that stays there when others come and go.
MOST_MOVED = 0.25
#: Times that a request may move from replica to replica while it runs; here it runs for 0.4 s, and
#: behind a split once more.
MOST_MOVES = 3
ROLES = ("prefill", "prefill", "decode", "decode", "decode")

Traffic = Iterable[tuple[float, RoutedRequest]]


def churned(
    subject: RouterSubject, seed: int, delay: float = 0.0, roles: Sequence[str] = ()
) -> ToyFleet:
    """Conversations on five replicas, of which some die and come back, all of them at once too."""
    fleet = subject.fleet(5, delay=delay, seed=seed, roles=roles)
    for when, request in conversations(400, 4 * FULL, seed):
        fleet.arrive(when, request)
    rng = random.Random(f"{seed} churn")
    for _ in range(10):
        when, name = 1.0 + 7.0 * rng.random(), f"r{rng.randrange(5)}"
        fleet.at(when, partial(_fall, fleet, name, 0.05 + rng.random()))
    for number in range(5):
        fleet.at(5.0 + 0.01 * number, partial(_fall, fleet, f"r{number}", 0.5))
    fleet.run()
    return fleet


def _check_ends(subject: RouterSubject, fleet: ToyFleet) -> None:
    """Each request has ended, and none has waited for the router for a minute."""
    asked = {decision.request_id for decision in fleet.decisions}
    if lost := sorted(asked - fleet.ends.keys()):
        raise RouterViolation(f"{subject.name}: {lost[0]} has not ended, of {len(asked)}")
    if waited := [name for name, end in fleet.ends.items() if end == "waited"]:
        raise RouterViolation(
            f"{subject.name}: {waited[0]} waited for the router for a minute and got no replica"
        )


def _fall(fleet: ToyFleet, name: str, seconds: float) -> None:
    if name in fleet.replicas:
        fleet.kill(name)
        fleet.at(fleet.now + seconds, partial(fleet.start, name))


def _run(
    subject: RouterSubject,
    traffic: Traffic,
    *,
    num_replicas: int = NUM_REPLICAS,
    delay: float = 0.0,
    silent: frozenset[str] = frozenset(),
    may_flood: bool = False,
) -> ToyFleet:
    fleet = subject.fleet(num_replicas, delay=delay, silent=silent)
    for when, request in traffic:
        fleet.arrive(when, request)
        if not may_flood:
            fleet.at(when, partial(_check_flood, subject, fleet))
    fleet.run()
    return fleet


def _check_flood(subject: RouterSubject, fleet: ToyFleet) -> None:
    held = {name: replica.num_requests for name, replica in fleet.replicas.items()}
    most, least = max(held, key=held.__getitem__), min(held, key=held.__getitem__)
    if held[most] > FLOOD * NUM_SEATS and held[least] <= NUM_SEATS // 2:
        raise RouterViolation(
            f"{subject.name}: at {fleet.now:.3f} s {most} holds {held[most]} requests and {least} "
            f"{held[least]}, of {NUM_SEATS} seats each: a replica is flooded that holds more than "
            f"{FLOOD} times its seats while another has half of them free"
        )


def _check_starved(subject: RouterSubject, fleet: ToyFleet, where: str) -> None:
    due = LEAST_SHARE * fleet.num_sent.total() / len(fleet.replicas)
    for name in fleet.replicas:
        if fleet.num_sent[name] < due:
            raise RouterViolation(
                f"{subject.name}: {name} was sent {fleet.num_sent[name]} of "
                f"{fleet.num_sent.total()} requests to a full fleet of {len(fleet.replicas)}, "
                f"{where}: it is due an eighth of its share at least, {due:.0f}"
            )


def _homes(subject: RouterSubject, dispatcher: Dispatcher, sessions: list[str]) -> dict[str, str]:
    return {session: _home(subject, dispatcher, session) for session in sessions}


def _home(subject: RouterSubject, dispatcher: Dispatcher, session: str) -> str:
    asked = RoutedRequest(num_tokens=100, session=session, hints={"session": session})
    answer = dispatcher.choose(asked)
    if not isinstance(answer, str):
        words = "lets it wait" if isinstance(answer, Wait) else f"answers {answer!r}"
        raise RouterViolation(
            f"{subject.name}: {session} has an idle fleet, and the router {words}"
        )
    assignment = dispatcher.assign(asked, answer)
    assignment.has_started(0.0)
    assignment.has_ended()
    return answer


def _check_kept(
    subject: RouterSubject,
    before: dict[str, str],
    after: dict[str, str],
    what: str,
    at_most: float,
) -> None:
    gone = set(before.values()) - set(after.values())
    moved = list(_moved(before, after, gone))
    if len(moved) > at_most * len(before):
        session = moved[0]
        raise RouterViolation(
            f"{subject.name}: keeps_sessions is promised, and {len(moved)} of {len(before)} "
            f"sessions have left a replica that lives after {what}, such as {session} from "
            f"{before[session]} to {after[session]}; {at_most:.0%} may"
        )


def _moved(before: dict[str, str], after: dict[str, str], gone: set[str]) -> Iterator[str]:
    return (s for s, home in before.items() if home not in gone and after[s] != home)


# What a router's decision costs, what it keeps, and what it reads or calls without being asked.


NUM_ASKED = 12
NUM_BLOCKS = 24  # of a prompt, the first of which every replica holds
REST_SECONDS = 3600.0  # between waves of requests: what is kept for a time may go

#: Modules of the sender, whose lines are not the router's.
OF_SENDER = "aioserve.fleet.routing.dispatcher", "aioserve.fleet.routing.views"


def _count(subject: RouterSubject, num_replicas: int) -> Lines:
    """Return the lines of the decision that runs most of them, after the first."""
    dispatcher = Dispatcher(subject.kind, dict(subject.options), clock=lambda: 1.0)
    common = prompt("common")
    for number in range(num_replicas):
        name = f"r{number}"
        dispatcher.join(name)
        report = ReplicaReport(
            number % 7,
            number % 3,
            number % 50,
            8,
            6400,
            3200,
            0.01 + number / 1e5,
            0.01,
            1e-4,
            800,
            ("a",),
        )
        dispatcher.on_report(name, lambda report=report: (report, 0.5))  # type: ignore[misc]
        dispatcher.on_kv_event(name, BlockStored(common[0], None, []))
        for block_hash in prompt("common", *range(number % NUM_BLOCKS))[1:]:
            dispatcher.on_kv_event(name, BlockStored(block_hash, None, []))
    worst = Lines()
    for number in range(NUM_ASKED):
        asked = RoutedRequest(
            request_id=f"q{number}",
            num_tokens=BLOCK_SIZE * NUM_BLOCKS,
            session=f"s{number % 5}" if number % 3 else "",
            user=f"u{number % 4}",
            block_hashes=prompt("common", *range(NUM_BLOCKS - 1)),
            block_size=BLOCK_SIZE,
            hints={"slo_class": "chat", "slo_ttft": 0.5, "slo_tpot": 0.05},
        )
        lines = Lines()
        answer = count_lines(partial(dispatcher.choose, asked), lines, OF_SENDER)
        if number >= 3:  # the first of each kind may prepare what others use
            worst = max(worst, lines, key=Counter.total)
        if isinstance(answer, str):
            dispatcher.assign(asked, answer)
    return worst


class _Plain(BaseRouter):
    def choose(self, request: RoutedRequest, replicas: Any) -> Any:
        return replicas[0]


class _Waves:
    """A router that has request after request served, each of a session of its own."""

    def __init__(self, subject: RouterSubject) -> None:
        self.num_served = 0
        self._now = 0.0
        self._made: list[BaseRouter] = []
        kept = self._made

        class Kept(subject.kind):  # type: ignore[name-defined,misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                kept.append(self)

        self._dispatcher = Dispatcher(Kept, dict(subject.options), clock=lambda: self._now)
        for number in range(4):
            self._dispatcher.join(f"r{number}")

    def serve(self, count: int) -> dict[str, int]:
        for number in range(self.num_served, self.num_served + count):
            self._now += 0.01
            hashes = prompt(f"{number}")
            asked = RoutedRequest(
                request_id=f"q{number}",
                num_tokens=20,
                session=f"s{number}",
                user=f"u{number % 5}",
                block_hashes=hashes,
                block_size=BLOCK_SIZE,
                hints={"session": f"s{number}"},
            )
            answer = self._dispatcher.choose(asked)
            if isinstance(answer, str):
                assignment = self._dispatcher.assign(asked, answer)
                assignment.has_started(self._now)
                assignment.has_ended()
        self.num_served += count
        self._now += REST_SECONDS
        (router,) = self._made
        return sizes_of_own(router, vars(_Plain()).keys())  # not what every router has


# What a router reads of replicas without asking for it, and what it calls that no run repeats.
# Looks at compiled code, and at calls while it decides. Knows no decision.


#: Of each flag of a router, the names that read what it brings.
FLAGS = (
    ("uses_reports", REPORTED),
    ("uses_prefixes", {"prefixes", "block_hashes", "block_size"}),
    ("uses_programs", {"programs", "turn"}),
)


def answers_of(spec: str, options: dict[str, Any]) -> list[str]:
    """Return what the router that `spec` names answers while replicas come and go."""
    return answers(RouterSubject(load_router(spec), options))


def answers(subject: RouterSubject) -> list[str]:
    """Return what the router answers while replicas come and go."""
    return churned(subject, seed=7).answers()


def _own_code(kind: type) -> Iterator[CodeType]:
    """Code of the class, of its bases that are no part of the seam, and functions within."""
    for base in kind.__mro__:
        if base.__module__.startswith(("aioserve.fleet.routing", "builtins", "abc")):
            continue
        for value in vars(base).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if hasattr(function, "__code__"):
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
