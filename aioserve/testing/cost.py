"""How much a policy's `schedule` does for how many requests: lines of Python, not seconds.

Counts are the same on every machine; the slowest call in seconds is kept for a report, and nothing
is judged by it. Knows lines. Knows nothing about what a line does.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.testing.bare_run import BareRun
from aioserve.testing.violation import ContractViolation

SIZES = 60, 240  # requests that run, and as many that wait
#: Lines for the second size, in those for the first: 4 in proportion, 5.4 if all are sorted, 16 for
#: every pair.
MOST_TIMES = 8
NUM_STEPS = 12  # every second one is counted, the others are timed


@dataclass(frozen=True)
class SlowestCall:
    """The call of `schedule` that took longest, in seconds of this machine."""

    seconds: float
    num_running: int
    num_waiting: int


SLOWEST: dict[type, SlowestCall] = {}  # by policy, for the report at the end of a test run


def check_cost(policy: type[BaseScheduler], options: Mapping[str, Any]) -> None:
    """Raise `ContractViolation` if `schedule` does work for each pair of requests."""
    few, many = (_count(policy, options, size) for size in SIZES)
    times = many.total() / few.total()
    if times <= MOST_TIMES:
        return
    (code, line), count = max(many.items(), key=lambda item: item[1])
    raise ContractViolation(
        f"{policy.__name__}: schedule() runs {many.total():,} lines with {SIZES[1]} running "
        f"requests and as many that wait, and {few.total():,} with {SIZES[0]} and {SIZES[0]}: "
        f"{times:.0f} times as many for {SIZES[1] // SIZES[0]} times the requests; most often "
        f"{Path(code.co_filename).name}:{line} in {code.co_name}(), {count:,} times"
    )


def _count(
    policy: type[BaseScheduler], options: Mapping[str, Any], size: int
) -> Counter[tuple[CodeType, int]]:
    """The lines of the call that runs most of them, among those of some steps in a crowd."""
    run = BareRun(policy, options, size)
    for number in range(2 * size):
        run.add(
            number,
            3 + number % 5,
            6 + number % 23,
            user=f"u{number % (size // 4)}",
            priority=(7 * number) % 3,
            hints={"session": f"s{number % (size // 2)}"},
        )
    worst: Counter[tuple[CodeType, int]] = Counter()
    for number in range(NUM_STEPS):
        lines: Counter[tuple[CodeType, int]] = Counter()
        is_timed = number % 2
        run.step(_timed(run.scheduler) if is_timed else _counted(run.scheduler, lines))
        worst = max(worst, lines, key=Counter.total)
    return worst


def _counted(
    scheduler: BaseScheduler, lines: Counter[tuple[CodeType, int]]
) -> Callable[[], SchedulerOutput]:
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event in ("line", "call"):
            lines[frame.f_code, frame.f_lineno] += 1
        return trace

    def schedule() -> SchedulerOutput:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return scheduler.schedule()
        finally:
            sys.settrace(before)

    return schedule


def _timed(scheduler: BaseScheduler) -> Callable[[], SchedulerOutput]:
    def schedule() -> SchedulerOutput:
        counts = scheduler.get_request_counts()
        begin = perf_counter()
        output = scheduler.schedule()
        call = SlowestCall(perf_counter() - begin, *counts)
        policy = type(scheduler)
        if policy not in SLOWEST or call.seconds > SLOWEST[policy].seconds:
            SLOWEST[policy] = call
        return output

    return schedule
