"""What a router's decision costs, what it keeps, and what it reads or calls without being asked.

Lines of Python and bytes, not seconds.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from aioserve.fleet.routing import (
    REPORTED,
    BaseRouter,
    Dispatcher,
    ReplicaReport,
    RoutedRequest,
    load_router,
)
from aioserve.kv_cache.block_pool import BlockStored
from aioserve.testing import hash_order
from aioserve.testing.cost import MANY, MOST_BYTES, WAVE, size_of
from aioserve.testing.routers.toy_fleet import BLOCK_SIZE, RouterSubject, prompt
from aioserve.testing.side_effects import watched_calls
from aioserve.testing.violation import RouterViolation

SIZES = 100, 1000  # replicas
#: Lines for the second size, in those for the first: 10 in proportion, 15 if all are sorted, 100
#: for every pair.
MOST_TIMES = 20
#: Lines of a decision, per replica of the larger fleet.
MOST_LINES = 60
NUM_ASKED = 12
NUM_BLOCKS = 24  # of a prompt, the first of which every replica holds
REST_SECONDS = 3600.0  # between waves of requests: what is kept for a time may go

#: Modules of the sender, whose lines are not the router's.
OF_SENDER = "aioserve.fleet.routing.dispatcher", "aioserve.fleet.routing.views"

Lines = Counter[tuple[CodeType, int]]


def check_cost(subject: RouterSubject) -> None:
    """A decision looks at each replica a bounded number of times."""
    few, many = (_count(subject, size) for size in SIZES)
    times, per_replica = many.total() / max(few.total(), SIZES[0]), many.total() / SIZES[1]
    if times <= MOST_TIMES and per_replica <= MOST_LINES:
        return
    (code, line), count = max(many.items(), key=lambda item: item[1])
    raise RouterViolation(
        f"{subject.name}: a decision runs {many.total():,} lines with {SIZES[1]:,} replicas and "
        f"{few.total():,} with {SIZES[0]}: at most {MOST_TIMES} times as many and {MOST_LINES} a "
        f"replica are allowed; most often {Path(code.co_filename).name}:{line} in "
        f"{code.co_name}(), {count:,} times"
    )


def check_memory(subject: RouterSubject) -> None:
    """What is kept of requests that have ended has a bound."""
    waves = _Waves(subject)
    if not any(waves.grown(WAVE, 3 * WAVE).values()):
        return
    for name, (before, after) in waves.grown(MANY, MANY).items():
        raise RouterViolation(
            f"{subject.name}: self.{name} grows with requests that have ended: it takes {before:,} "
            f"bytes after {waves.num_served - MANY:,} of them and {after:,} after "
            f"{waves.num_served:,}; what is kept of requests needs a bound, of 10,000 at most"
        )


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
    worst: Lines = Counter()
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
        lines: Lines = Counter()
        answer = _traced(dispatcher, asked, lines)
        if number >= 3:  # the first of each kind may prepare what others use
            worst = max(worst, lines, key=Counter.total)
        if isinstance(answer, str):
            dispatcher.assign(asked, answer)
    return worst


def _traced(dispatcher: Dispatcher, asked: RoutedRequest, lines: Lines) -> Any:
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_globals.get("__name__", "") in OF_SENDER:
            return None  # what the sender does is not the router's
        if event in ("line", "call"):
            lines[frame.f_code, frame.f_lineno] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return dispatcher.choose(asked)
    finally:
        sys.settrace(before)


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

    def grown(self, first: int, more: int) -> dict[str, tuple[int, int]]:
        """Sizes in bytes after `first` requests, and after `more` of them, of what has grown."""
        before, after = self._serve(first), self._serve(more)
        return {
            name: (before.get(name, 0), size)
            for name, size in after.items()
            if size - before.get(name, 0) >= MOST_BYTES * more
        }

    def _serve(self, count: int) -> dict[str, int]:
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
        shared = vars(_Plain()).keys()  # that every router has
        theirs = {id(vars(router)[name]) for name in shared} | {id(router), id(vars(router))}
        own = {name: value for name, value in vars(router).items() if name not in shared}
        return {name: size_of(value, theirs) for name, value in own.items()}


# What a router reads of replicas without asking for it, and what it calls that no run repeats.
# Looks at compiled code, and at calls while it decides. Knows no decision.


PREFIXES = {"prefixes", "block_hashes", "block_size"}


def check_reads(subject: RouterSubject) -> None:
    """A router states `uses_reports` or `uses_prefixes` if its code reads what these bring."""
    kind = subject.kind
    names = {name for code in _own_code(kind) for name in code.co_names}
    for flag, needed in (("uses_reports", REPORTED), ("uses_prefixes", PREFIXES)):
        read = sorted(names & needed)
        if read and not getattr(kind, flag):
            raise RouterViolation(
                f"{subject.name} reads {', '.join(read)}, which nothing fills without "
                f"`{flag} = True` in the class"
            )


def check_foreign_calls(subject: RouterSubject) -> None:
    """No clock, dice or sleep but the router's own."""
    with watched_calls(subject.kind, lambda: subject.name, "router"):
        answers(subject)


def check_hash_order(subject: RouterSubject) -> None:
    """The same events give the same answers where strings have other hashes."""
    hash_order.check_answers_alike(subject.kind, subject.options, "router", __name__)


def answers_of(spec: str, options: dict[str, Any]) -> list[str]:
    """Return what the router that `spec` names answers while replicas come and go."""
    return answers(RouterSubject(load_router(spec), options))


def answers(subject: RouterSubject) -> list[str]:
    """Return what the router answers while replicas come and go."""
    from aioserve.testing.routers.rules import churned

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
