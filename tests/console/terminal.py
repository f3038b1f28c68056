"""A pseudo-terminal: a program at one end, a test that types and reads at the other."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.processes import PATIENCE, started

# Ctrl-C is a signal to whoever has the terminal: a session of its own alone has none.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


# What moves the cursor and sets colours, and what fills the time that old terminals took for it.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x00")


class Terminal:
    """One end of a pseudo-terminal, with a chat at the other."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.shown = ""

    def modes(self) -> list[object]:
        """How the terminal treats what is typed, as `termios` has it."""
        return termios.tcgetattr(self._file)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait(self, pattern: str) -> str:
        """Until it matches what was shown since the last time; what was shown up to there."""
        give_up = time.monotonic() + PATIENCE
        while not (match := re.search(pattern, self.shown)):
            assert time.monotonic() < give_up, f"{pattern!r} not in {self.shown!r}"
            if select.select([self._file], [], [], 1)[0]:
                try:
                    self.shown += os.read(self._file, 65536).decode(errors="replace")
                    self.shown = CONTROL.sub("", self.shown)
                except OSError:  # nobody is at the other end any more
                    raise AssertionError(f"{pattern!r} not in {self.shown!r}") from None
        before, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return before


@contextmanager
def at_terminal(
    *command: str, environment: dict[str, str] | None = None, columns: int = 200
) -> Iterator[tuple[Terminal, "subprocess.Popen[str]"]]:
    """A program that has the terminal."""
    outer, inner = pty.openpty()
    termios.tcsetwinsize(inner, (25, columns))
    given = {**os.environ, "TERM": "dumb", "INPUTRC": os.devnull, **(environment or {})}
    for name in ("COLUMNS", "LINES"):  # readline sets them in the process that starts test workers
        given.pop(name, None)
    streams = {"stdin": inner, "stdout": inner, "stderr": inner}
    try:
        with started(
            *(sys.executable, "-c", TAKE_TERMINAL), *command, env=given, **streams
        ) as process:
            os.close(inner)
            yield Terminal(outer), process
    finally:
        os.close(outer)
