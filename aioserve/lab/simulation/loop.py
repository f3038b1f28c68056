"""An event loop whose clock jumps to the next timer when nothing is ready.

Everything on it that takes its time from the loop runs unchanged, as fast as it computes, and in
the same order every time. Knows nothing about engines. Threads are not simulated: a callback from
one is taken when it comes.
"""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVarTuple, Unpack

_Ts = TypeVarTuple("_Ts")


class VirtualClockEventLoop(asyncio.SelectorEventLoop):
    """Starts at second 0. Use it as `asyncio.Runner(loop_factory=VirtualClockEventLoop)`."""

    # Of asyncio's own loop, since Python 3.4: what is to run now, and the heap of timers.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._now = 0.0
        self._jumping = _JumpingSelector(self)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Move the virtual clock forward."""
        self._now += seconds

    def jump_to(self, when: float) -> bool:
        """Move the clock to `when` if nothing else would happen until then; else False.

        What would be the next timer anyhow need not become one: that is a third of the cost of a
        simulated step.
        """
        if self._ready or (self._scheduled and self._scheduled[0].when() <= when):
            return False
        self._now = max(self._now, when)
        return True

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        self._jumping.is_woken = True
        return super().call_soon_threadsafe(callback, *args, context=context)


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the clock to the next timer where a real one would sleep until then."""

    def __init__(self, loop: VirtualClockEventLoop) -> None:
        super().__init__()
        self.is_woken = False  # a thread has written to the loop's own socket
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # no timer at all: only a thread or a socket can wake the loop
            self.is_woken = False
            return super().select(None)
        events: list[Any] = []
        if self.is_woken or len(self.get_map()) > 1:  # asking the system costs a tenth of a step
            self.is_woken = False
            events = super().select(0)
        if not events and timeout > 0:
            self._loop.jump(timeout)
        return events
