"""Where timestamps come from: one clock for arrivals, tokens, deadlines and logs; and loop lag.

Knows event loops by where their `time()` is defined. Timers stay the loop's own: `call_at` wants
its time, and durations for `call_later` can be taken from either.
"""

import asyncio
import time
from collections.abc import Callable

Clock = Callable[[], float]

# asyncio's `time()` is `time.monotonic`. uvloop's is the same clock in whole milliseconds: as
# coarse as a step of a small model.
REAL_TIME = ("asyncio.base_events", "uvloop.loop")

LAG_PROBE_SECONDS = 0.02


def clock_of(loop: asyncio.AbstractEventLoop) -> Clock:
    """Return seconds: `time.monotonic` for a loop in real time, for any other its own `time`, since
    that may be virtual.
    """
    owner = next(cls for cls in type(loop).__mro__ if "time" in vars(cls))
    return time.monotonic if owner.__module__ in REAL_TIME else loop.time


def is_real(clock: Clock) -> bool:
    """Return whether a clock that `clock_of` gave runs by itself."""
    return clock is time.monotonic


class LoopLag:
    """The time by which the event loop was late, measured by a timer that is set anew at each
    question.

    No timer runs without a reader: an idle engine costs nothing.
    """

    def __init__(self) -> None:
        self._worst = 0.0
        self._due: float | None = None

    def __call__(self) -> float:
        """Return the worst since the last call, in seconds."""
        now = time.monotonic()
        worst = self._worst
        if self._due is None:
            self._due = now + LAG_PROBE_SECONDS
            asyncio.get_running_loop().call_later(LAG_PROBE_SECONDS, self._fire)
        else:
            worst = max(worst, now - self._due)  # overdue, and still not called
        self._worst = 0.0
        return worst

    def _fire(self) -> None:
        assert self._due is not None
        self._worst = max(self._worst, time.monotonic() - self._due)
        self._due = None
