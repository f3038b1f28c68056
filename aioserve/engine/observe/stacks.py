"""What the threads of this process are doing now: stacks, read from another thread.

Knows frames and names of threads; knows nothing about engines.
"""

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType

from aioserve.support.logs import wait_streams_written

# A log line is written within this many seconds, or its caller goes on without it: the thread
# that hangs may hold the lock of the log.
LOG_SECONDS = 1.0

#: Modules that stand on the stack of a thread which a debugger holds.
DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy")

#: What the threads of runners are called, up to a number.
RUNNER_THREADS = ("aioserve-runner", "aioserve-launch", "aioserve-read")


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of a running thread; None if the thread has ended."""
    return sys._current_frames().get(thread_id)


def told(frame: FrameType | None) -> str:
    """A stack as Python prints it, the innermost frame last."""
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  (ended)"


def stacks_of_runners() -> str:
    """The stacks of the threads that compute steps, each below the name of its thread."""
    stacks = [
        f"thread {thread.name}:\n{told(frame_of(thread.ident))}"
        for thread in threading.enumerate()
        if thread.name.startswith(RUNNER_THREADS) and thread.ident is not None
    ]
    return "\n".join(stacks) or "no thread of this process computes steps"


def is_debugged(frame: FrameType | None) -> bool:
    """Whether a debugger of Python holds the thread at a prompt or a breakpoint."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def log_within(seconds: float, log: Callable[..., None], *arguments: object) -> None:
    """Write a line of the log on a thread of its own, and wait at most `seconds` for it."""

    def write() -> None:
        with contextlib.suppress(Exception):  # the stream is closed at the end of a process
            log(*arguments)
            for handler in logging.getLogger().handlers:
                handler.flush()
            wait_streams_written(seconds)

    writer = threading.Thread(target=write, name="aioserve-last-words", daemon=True)
    writer.start()
    writer.join(seconds)
