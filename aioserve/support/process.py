"""What a process does before all else: what it inherits from its parent, and what Python lacks.

Imports nothing heavy, so that a signal in the first moments of a server is heard.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

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
    """Of the first three descriptors, those that are closed lead to nowhere."""
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
    """One line for an import that failed: the package, the Python that lacks it, what to type.

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
