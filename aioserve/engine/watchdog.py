"""Notices from a thread of its own that the event loop, or a step of the runner, hangs.

It says where in the log, and in the end declares the engine dead. Counts its own looks, not time:
a process that was stopped as a whole (SIGSTOP, a frozen container, a laptop asleep) has not hung.
A look needs the interpreter's lock, which a loop of Python code gives up every few milliseconds. A
C function that keeps the lock for ever stops the watchdog too; then `LockGuard` ends the process.
`LoopMonitor` measures on the loop itself by how much it is late.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from aioserve.config import ServerConfig
from aioserve.engine.metrics import EngineMetrics, RecentWorst
from aioserve.outputs import SchedulerStats
from aioserve.scheduler.blame import find_running_line

if TYPE_CHECKING:
    from aioserve.engine.lock_guard import LockGuard

logger = logging.getLogger(__name__)

MAX_TICK_SECONDS = 1.0
TICKS_PER_BOUND = 4  # looks within the shortest bound


class _Hang:
    """The time for which one thing has stood still."""

    def __init__(self, tick: float, said_after: float, dead_after: float | None) -> None:
        """All in seconds; `dead_after` None: it never counts as dead."""
        self._tick, self._said_after, self._dead_after = tick, said_after, dead_after
        self._num_ticks = 0
        self.was_said = self.was_dead = False

    @property
    def seconds(self) -> float:
        return self._num_ticks * self._tick

    def moves(self) -> bool:
        """Note that it has moved; returns whether the log said that it hangs."""
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
    """A watchdog of one engine on one loop; for real time only."""

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
        self._guard: LockGuard | None = None  # renewed by the watchdog's thread
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
        if self._dead_loop_seconds is not None:  # before the first look: a request may come sooner
            from aioserve.engine.lock_guard import LockGuard

            self._guard = LockGuard(self._dead_loop_seconds)

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
                    if self._guard is not None:
                        self._guard.renew()
                    self._look()
                except RuntimeError:  # the loop is closed: nothing is left to watch over
                    return
                except Exception as error:  # a watchdog that has died would be silent
                    logger.exception("the watchdog failed to look", exc_info=error)
        finally:
            if self._guard is not None:
                self._guard.close()

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
        """Judge the step, but only while the loop turns: else its result was not taken."""
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


# A timer that beats while there are requests: how late the loop is, and the state for the log. None
# runs while there are no requests: an idle engine costs nothing. Knows what to call; not why.


BEAT_SECONDS = 0.1
STATE_SECONDS = 10.0  # between two lines


class LoopMonitor:
    """A monitor of how late the loop of one process is; for real time only."""

    def __init__(
        self,
        is_busy: Callable[[], bool],
        on_delay: Callable[[float], None],
        on_state: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`on_delay` is told at each beat by how many seconds it is late, `on_state` how many
        seconds have passed since it was called last, or since the work began.
        """
        self._is_busy = is_busy
        self._on_delay = on_delay
        #: The worst delay of the last minute, in seconds.
        self.worst = RecentWorst()
        self._on_state = on_state
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._since = 0.0

    def start(self) -> None:
        """Note that there is work. Does nothing if that was known."""
        if self._timer is None:
            self._since = time.monotonic()
            self._set()

    def stop(self) -> None:
        """Stop the timer if it runs. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._due = time.monotonic() + BEAT_SECONDS
        self._timer = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        delay = max(now - self._due, 0.0)
        self._timer = None
        if self._is_busy():
            self._set()  # first: the beat after one whose delay could not be told still comes
        self.worst.observe(delay)
        self._on_delay(delay)
        if now - self._since >= STATE_SECONDS:
            self._on_state(now - self._since)
            self._since = now


class StateLog:
    """The line that says how things stand."""

    def __init__(
        self, get_stats: Callable[[], SchedulerStats | None], metrics: EngineMetrics
    ) -> None:
        self._get_stats = get_stats
        self._metrics = metrics
        self._last = (0, 0)  # tokens of prompts and outputs that were told

    def write(self, seconds: float) -> None:
        """Log the state of the engine, and tokens per second over the last `seconds`."""
        stats = self._get_stats()
        if stats is None:
            return
        now = (self._metrics.num_prompt_tokens, self._metrics.num_generation_tokens)
        prompt, output = (count - before for count, before in zip(now, self._last, strict=True))
        self._last = now
        logger.info(
            "%d running, %d waiting; %.0f prompt and %.0f output tokens/s; KV cache %.0f%% in use, "
            "%.0f%% of prompt tokens were cached; %d preemptions",
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            prompt / seconds,
            output / seconds,
            100 * stats.kv_cache_usage,
            100 * stats.prefix_hit_rate,
            stats.num_preemptions,
        )


# What the threads of this process are doing now: stacks, read from another thread. Knows frames and
# names of threads; knows nothing about engines.


# A log line is written within this many seconds, or its caller goes on without it: the thread
# that hangs may hold the lock of the log.
LOG_SECONDS = 1.0

#: Modules that stand on the stack of a thread which a debugger holds.
DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy")

#: What the threads of runners are called, up to a number.
RUNNER_THREADS = ("aioserve-runner", "aioserve-launch", "aioserve-read")


def frame_of(thread_id: int) -> FrameType | None:
    """Return the innermost frame of a running thread; None if the thread has ended."""
    return sys._current_frames().get(thread_id)


def told(frame: FrameType | None) -> str:
    """Return a stack as Python prints it, the innermost frame last."""
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  (ended)"


def stacks_of_runners() -> str:
    """Return the stacks of the threads that compute steps, each below the name of its thread."""
    stacks = [
        f"thread {thread.name}:\n{told(frame_of(thread.ident))}"
        for thread in threading.enumerate()
        if thread.name.startswith(RUNNER_THREADS) and thread.ident is not None
    ]
    return "\n".join(stacks) or "no thread of this process computes steps"


def is_debugged(frame: FrameType | None) -> bool:
    """Return whether a debugger of Python holds the thread at a prompt or a breakpoint."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def log_within(seconds: float, log: Callable[..., None], *arguments: object) -> None:
    """Write a line of the log on a thread of its own, and wait at most `seconds` for it."""

    def write() -> None:
        from aioserve.support.logs import wait_streams_written

        with contextlib.suppress(Exception):  # the stream is closed at the end of a process
            log(*arguments)
            for handler in logging.getLogger().handlers:
                handler.flush()
            wait_streams_written(seconds)

    writer = threading.Thread(target=write, name="aioserve-last-words", daemon=True)
    writer.start()
    writer.join(seconds)
