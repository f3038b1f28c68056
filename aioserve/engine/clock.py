"""Where timestamps come from: one clock for arrivals, tokens, deadlines and logs.

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


def clock_of(loop: asyncio.AbstractEventLoop) -> Clock:
    """Seconds: `time.monotonic` for a loop in real time, for any other its own `time`, since that
    may be virtual.
    """
    owner = next(cls for cls in type(loop).__mro__ if "time" in vars(cls))
    return time.monotonic if owner.__module__ in REAL_TIME else loop.time


def is_real(clock: Clock) -> bool:
    """Whether a clock that `clock_of` gave runs by itself."""
    return clock is time.monotonic
