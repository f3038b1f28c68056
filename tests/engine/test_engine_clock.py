"""One clock for all timestamps: finer than a millisecond where time is real, virtual where not."""

import asyncio
import threading
import time
from pathlib import Path

import uvloop

from aioserve.engine.clock import LAG_PROBE_SECONDS, LoopLag, clock_of, is_real
from aioserve.lab import VirtualClockEventLoop
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog
from tests.lab.traffic import record
from tests.processes import PATIENCE


def test_a_loop_with_a_time_of_its_own_keeps_it() -> None:
    class SlowLoop(uvloop.Loop):
        def time(self) -> float:
            return super().time() / 2

    for loop, has_real_time in (
        (asyncio.new_event_loop(), True),
        (uvloop.new_event_loop(), True),
        (VirtualClockEventLoop(), False),
        (SlowLoop(), False),
    ):
        clock = clock_of(loop)
        assert is_real(clock) == has_real_time
        assert clock == (time.monotonic if has_real_time else loop.time)
        loop.close()


def hold_up(seconds: float) -> None:
    """Whatever runs on this thread, until another one says that it is over."""
    is_over = threading.Event()
    timer = threading.Timer(seconds, is_over.set)
    timer.start()
    assert is_over.wait(PATIENCE)
    timer.join()


async def test_the_lag_of_a_blocked_loop_is_told_once() -> None:
    """By the timer that is overdue, and by the same one when it has been called."""
    for is_called in (False, True):
        began, lag = time.monotonic(), LoopLag()
        assert lag() == 0.0
        hold_up(0.05)
        if is_called:
            await asyncio.sleep(2 * LAG_PROBE_SECONDS)
        found = lag()
        assert 0.05 - LAG_PROBE_SECONDS <= found < time.monotonic() - began  # in seconds
        if is_called:
            assert lag() == 0.0


def test_arrivals_are_finer_than_a_millisecond_on_every_loop(tmp_path: Path) -> None:
    for number, loop_factory in enumerate((asyncio.new_event_loop, uvloop.new_event_loop)):
        path = tmp_path / f"log{number}"
        record(path, loop_factory=loop_factory, num_requests=20, seconds=0.1)
        log = DecisionLog(path)
        chronicle = Chronicle(log.header)
        for item in log:
            chronicle.feed(item)
        fractions = [1e3 * life.arrival % 1 for life in chronicle.lives]
        assert sum(0.01 < fraction < 0.99 for fraction in fractions) > len(fractions) / 2
