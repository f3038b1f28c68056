"""Notices from a thread of its own that the event loop, or a step of the runner, hangs.

It says where in the log, and in the end declares the engine dead. Counts its own looks, not time: a
process that was stopped as a whole (SIGSTOP, a frozen container, a laptop asleep) has not hung. A
look needs the interpreter's lock, which a loop of Python code gives up every few milliseconds. A C
function that keeps the lock for ever stops the watchdog too; then `lock_guard` ends the process.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from aioserve.config import ServerConfig
from aioserve.engine.observe.lock_guard import LockGuard
from aioserve.engine.observe.stacks import (
    LOG_SECONDS,
    frame_of,
    is_debugged,
    log_within,
    stacks_of_runners,
    told,
)
from aioserve.scheduler.blame import find_running_line

logger = logging.getLogger(__name__)

MAX_TICK_SECONDS = 1.0
TICKS_PER_BOUND = 4  # so often the shortest bound is looked at before it has passed


class _Hang:
    """For how long one thing has stood still."""

    def __init__(self, tick: float, said_after: float, dead_after: float | None) -> None:
        """All in seconds; `dead_after` None: it never counts as dead."""
        self._tick, self._said_after, self._dead_after = tick, said_after, dead_after
        self._num_ticks = 0
        self.was_said = self.was_dead = False

    @property
    def seconds(self) -> float:
        return self._num_ticks * self._tick

    def moves(self) -> bool:
        """It has moved; returns whether the log said that it hangs."""
        was_said = self.was_said
        self._num_ticks, self.was_said, self.was_dead = 0, False, False
        return was_said

    def stands(self) -> tuple[bool, bool]:
        """It has not moved since the last look; returns whether that is to be said now, and whether
        it counts as dead from now on.
        """
        self._num_ticks += 1
        is_dead = self._dead_after is not None and self.seconds >= self._dead_after
        says = (is_dead or self.seconds >= self._said_after) and not self.was_said
        dies = is_dead and not self.was_dead
        self.was_said, self.was_dead = self.was_said or says, self.was_dead or dies
        return says, dies


class Watchdog:
    """Of one engine on one loop; for real time only."""

    def __init__(
        self,
        settings: ServerConfig,
        get_policy: Callable[[], type],
        get_step: Callable[[], float | None],
        has_requests: Callable[[], bool],
        on_dead_step: Callable[[str], None],
    ) -> None:
        """`get_step` names the oldest step in flight, by when it began; None: there is none.
        `on_dead_step` is called on the loop with what has happened, in words. To be made on the
        thread of the running loop.
        """
        bounds = (settings.hung_loop_seconds, settings.hung_step_seconds)
        ends = (settings.dead_loop_seconds, settings.dead_step_seconds)
        shortest = min(bound for bound in (*bounds, *ends) if bound is not None)
        self._tick = min(shortest / TICKS_PER_BOUND, MAX_TICK_SECONDS)
        self._loop_hang, self._step_hang = (
            _Hang(self._tick, said, dead) for said, dead in zip(bounds, ends, strict=True)
        )
        self._get_policy, self._get_step, self._has_requests = get_policy, get_step, has_requests
        self._on_dead_step = on_dead_step
        # Called on the watchdog's thread, with what has happened, when the loop counts as dead: no
        # task can run any more. None: the loop is the caller's, and only the log says it, while
        # there are requests.
        self._on_dead_loop: Callable[[str], None] | None = None
        self._dead_loop_seconds = settings.dead_loop_seconds
        self._guard: LockGuard | None = None  # of the watchdog's thread
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._has_turned = True
        self._step: float | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aioserve-watchdog", daemon=True)
        self._thread.start()

    def end_process_with_loop(self, end: Callable[[str], None]) -> None:
        """From now on call `end`, on the watchdog's thread and with what has happened, when the
        loop counts as dead; and end the process, should no Python code run for that long.
        """
        self._on_dead_loop = end

    def close(self) -> None:
        """End the thread that watches. Idempotent."""
        self._is_closed.set()

    def _turn(self) -> None:
        self._has_turned = True

    # What follows runs on the watchdog's thread.

    def _run(self) -> None:
        try:
            while not self._is_closed.wait(self._tick):
                try:
                    self._renew_guard()
                    self._look()
                except RuntimeError:  # the loop is closed: nothing is left to watch over
                    return
                except Exception as error:  # a watchdog that has died would be silent
                    logger.exception("the watchdog failed to look", exc_info=error)
        finally:
            if self._guard is not None:
                self._guard.close()

    def _renew_guard(self) -> None:
        if self._guard is not None:
            self._guard.renew()
        elif self._on_dead_loop is not None and self._dead_loop_seconds is not None:
            self._guard = LockGuard(self._dead_loop_seconds)

    def _look(self) -> None:
        if self._has_turned:
            if self._loop_hang.moves():
                logger.warning("the event loop turns again")
            self._has_turned = False
            self._loop.call_soon_threadsafe(self._turn)
            self._look_at_step()
        elif self._on_dead_loop is not None or self._has_requests():
            self._look_at_loop()

    def _look_at_loop(self) -> None:
        frame = frame_of(self._loop_thread)
        if is_debugged(frame):
            self._loop_hang.moves()
            return
        says, dies = self._loop_hang.stands()
        if not (says or dies):
            return
        line = None if frame is None else find_running_line(frame, self._get_policy())
        where = ""
        if line is not None:
            name = self._get_policy().__name__
            where = f": policy {name} is at {Path(line.filename)}:{line.lineno}, in {line.name}()"
        what = f"the event loop has not turned for {self._loop_hang.seconds:.0f} s{where}"
        if says:
            log_within(LOG_SECONDS, logger.error, "%s; its stack:\n%s", what, told(frame))
        if dies and self._on_dead_loop is not None:
            self._on_dead_loop(what)

    def _look_at_step(self) -> None:
        """Only while the loop turns: else its result has not been taken."""
        step = self._get_step()
        if step is None or step != self._step:
            self._step = step
            if self._step_hang.moves():
                logger.warning("the step that hung has come back")
            return
        says, dies = self._step_hang.stands()
        if not (says or dies):
            return
        what = f"a step has not come back from the runner for {self._step_hang.seconds:.0f} s"
        if says:
            log_within(
                *(LOG_SECONDS, logger.error, "%s; what computes it:\n%s", what),
                stacks_of_runners(),
            )
        if dies:
            self._loop.call_soon_threadsafe(self._on_dead_step, what)
