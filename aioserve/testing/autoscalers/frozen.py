"""What an autoscaler answers about a fleet that does not change, and what an answer costs.

Makes its views by hand. Knows no toy fleet.
"""

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from aioserve.routing import FleetView, ReplicaView, RoutedRequest
from aioserve.testing.autoscalers.subject import AutoscalerSubject
from aioserve.testing.growth import MANY, MOST_BYTES, WAVE, size_of
from aioserve.testing.violation import RouterViolation

STARTUP, INTERVAL = 60.0, 5.0  # seconds
MOST = 40  # replicas
#: The most that the same load may have as an answer while replicas start, by the first answer.
MOST_TIMES = 2
SIZES = 100, 1000  # replicas
#: Lines of Python for the second size, by those for the first.
MOST_LINES_TIMES = 20
MOST_LINES = 60  # lines of a decision, per replica of the larger fleet
REST_SECONDS = 3600.0  # between waves of requests: what is kept for a time may go

Lines = Counter[tuple[CodeType, int]]


class _Frozen:
    """Two full replicas, or more, at which nothing changes but the time and what starts."""

    def __init__(self, subject: AutoscalerSubject, num_replicas: int = 2) -> None:
        self.now = 100.0
        self.num_starting = 0
        self.num_replicas = num_replicas
        self.autoscaler = subject.kind(dict(subject.options), clock=lambda: self.now)

    def ask(self, most: int = MOST) -> int:
        """One question, and what it leads to."""
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
        """The fleet, of which there may be `most` replicas."""
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
    (code, line), count = max(many.items(), key=lambda item: item[1])
    raise RouterViolation(
        f"{subject.name}: an answer runs {many.total():,} lines with {SIZES[1]:,} replicas and "
        f"{few.total():,} with {SIZES[0]}: at most {MOST_LINES_TIMES} times as many and "
        f"{MOST_LINES} a replica are allowed; most often {Path(code.co_filename).name}:{line} in "
        f"{code.co_name}(), {count:,} times"
    )


def check_memory(subject: AutoscalerSubject) -> None:
    """What is kept of requests and questions has a bound."""
    fleet = _Frozen(subject)
    if not any(_grown(fleet, WAVE, 3 * WAVE).values()):
        return
    for name, (before, after) in _grown(fleet, MANY, MANY).items():
        raise RouterViolation(
            f"{subject.name}: self.{name} grows with requests that have ended: it takes {before:,} "
            f"bytes before and {after:,} after {MANY:,} of them; what is kept of requests needs a "
            "bound, of 10,000 at most"
        )


def _count(subject: AutoscalerSubject, num_replicas: int) -> Lines:
    fleet, lines = _Frozen(subject, num_replicas), Lines()
    fleet.serve(500, seconds=0.5)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_globals.get("__name__", "") == __name__:
            return None
        if event in ("line", "call"):
            lines[frame.f_code, frame.f_lineno] += 1
        return trace

    view = fleet.view(2 * num_replicas)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fleet.autoscaler.decide(view)
    finally:
        sys.settrace(before)
    return lines


def _grown(fleet: _Frozen, first: int, more: int) -> dict[str, tuple[int, int]]:
    before, after = _serve(fleet, first), _serve(fleet, more)
    return {
        name: (before.get(name, 0), size)
        for name, size in after.items()
        if size - before.get(name, 0) >= MOST_BYTES * more
    }


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
