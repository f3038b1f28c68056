"""What a process does before all else: what it inherits from its parent, and what Python lacks.

Imports nothing heavy, so that a signal in the first moments of a server is heard.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# Seconds that the log has to be written when a server is interrupted before it listens.
LAST_LINES_SECONDS = 0.5


def prepare_process() -> None:
    """Have stdin, stdout and stderr, and hear every signal: to be called before sockets are opened,
    for a socket would get the number of a descriptor that is closed, and then what is printed.
    """
    _open_missing()
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # no exit code would be told
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _open_missing() -> None:
    """Open those of the first three descriptors that are closed, to nowhere."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            file = os.open(os.devnull, os.O_RDWR)
            if file != number:
                os.dup2(file, number)
                os.close(file)
            os.set_inheritable(number, True)  # else children have none again
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "r" if number == 0 else "w", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


_ends_at_sigterm = False


def end_at_sigterm() -> None:
    """Until the server listens to signals itself, SIGTERM ends the process with exit code 0, as it
    does later: whatever is being imported then has nothing to clean up.
    """
    global _ends_at_sigterm
    _ends_at_sigterm = True
    signal.signal(signal.SIGTERM, _end)


def ignore_sigterm() -> None:
    """The server has ended, and its exit code is known: no further SIGTERM makes another of it.
    Does nothing in a process that is not the server's own.
    """
    if _ends_at_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    # Not imported here: the import may be what was interrupted.
    writer = sys.modules.get("aioserve.support.logs")
    wait = getattr(writer, "wait_streams_written", None)
    if wait is not None:
        wait(LAST_LINES_SECONDS)
    os._exit(0)


# Whether another process goes on, for who waits for its answer.


# Seconds between two looks at a process whose answer is awaited.
LOOK_SECONDS = 0.25
# Looks in a row that find the process stopped (SIGSTOP, a debugger) before it counts as standing
# still. Looks are counted, not seconds: none happens while this process itself is stopped.
MAX_LOOKS_STOPPED = 4


class StandsStillError(Exception):
    """A process that is waited for stands still."""


class ProcessWatch:
    """A watch on whether a process that is waited for goes on."""

    def __init__(self, pid: int, seconds: float, max_looks_idle: int | None = None) -> None:
        """Watch a process that is waited for `seconds` at most. After `max_looks_idle` looks in a
        row that find it waiting it stands still; None: it may wait for others.
        """
        self._stat = f"/proc/{pid}/stat"  # of Linux; elsewhere there is patience alone
        self._give_up = time.monotonic() + seconds
        self._max_looks_idle = max_looks_idle
        self._num_stopped = self._num_idle = 0
        self._cpu_time: list[str] = []

    def wait(self, work: Callable[[], T]) -> T:
        """Do `work`, which raises `TimeoutError` after `LOOK_SECONDS`, again and again until it is
        done. Raises `TimeoutError` after all patience, and `StandsStillError`.
        """
        while True:
            try:
                return work()
            except TimeoutError:
                self._look()
                if self._num_stopped >= MAX_LOOKS_STOPPED:
                    raise StandsStillError("it is stopped") from None
                if self._max_looks_idle is not None and self._num_idle >= self._max_looks_idle:
                    raise StandsStillError("it waits") from None
                if time.monotonic() > self._give_up:
                    raise

    def _look(self) -> None:
        try:
            text = Path(self._stat).read_text(encoding="utf-8")
            state, *rest = text.rpartition(")")[2].split()
        except OSError:
            return
        cpu_time = rest[10:12]  # of its own, in user and system mode
        goes_on = state == "R" or cpu_time != self._cpu_time  # or is about to, if there is a core
        self._cpu_time = cpu_time
        self._num_stopped = self._num_stopped + 1 if state in "tT" else 0
        self._num_idle = 0 if goes_on else self._num_idle + 1


# Says which package a Python lacks, and the line that brings it. Imports the standard library
# alone: it speaks where nothing else can be imported.


CLONE = Path(__file__).parents[2]
#: Distributions whose names are not those of their modules.
DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "yaml": "pyyaml",
    "PIL": "pillow",
    "prometheus_client": "prometheus-client",
}


def way_out(error: ModuleNotFoundError) -> str:
    """Return one line for an import that failed: the package, the Python that lacks it, what to
    type.

    Raises `error` itself if a module of aioserve is missing: that is no package to install.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "aioserve"):
        raise error
    lacks = f"{sys.executable} lacks the package {package!r}"
    if not (CLONE / "Makefile").is_file():
        wanted = DISTRIBUTIONS.get(package, package)
        return f"{lacks}: {sys.executable} -m pip install {wanted}"
    python = CLONE / ".venv" / "bin" / "python"
    if Path(sys.prefix) == CLONE / ".venv":
        return f"{lacks}: make install, in {CLONE}, brings it"
    make = "" if python.exists() else f"make install, in {CLONE}, then "
    return f"{lacks}: {make}{python} -m aioserve has all that it needs"
