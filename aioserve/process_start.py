"""What a process of a server does before all else, with what it inherits from its parent.

A parent may have closed descriptors, blocked or ignored signals. Knows the system. Imports nothing
that takes time.
"""

import os
import signal
import sys
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
    writer = sys.modules.get("aioserve.background_writer")
    wait = getattr(writer, "wait_streams_written", None)
    if wait is not None:
        wait(LAST_LINES_SECONDS)
    os._exit(0)
