"""A terminal of its own for a program: its screen as text, as a person would see it."""

import os
import pty
import select
import signal
import termios
import time
from contextlib import contextmanager
from pathlib import Path

import pyte

COLUMNS, LINES = 100, 40
#: What programs ask of a terminal, and what one without colours of its own answers.
ANSWERS = {
    b"\x1b[c": b"\x1b[?62;c",
    b"\x1b]10;?": b"\x1b]10;rgb:ffff/ffff/ffff\x1b\\",
    b"\x1b]11;?": b"\x1b]11;rgb:0000/0000/0000\x1b\\",
}
#: Of the keyboard protocol of kitty, which pyte would print.
UNKNOWN = (b"\x1b[>4;1m", b"\x1b[>1u", b"\x1b[>7u")


class Terminal:
    """The terminal that a program runs in."""

    def __init__(self, descriptor):
        self._descriptor = descriptor
        self._screen = pyte.HistoryScreen(COLUMNS, LINES, history=500)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def text(self):
        """What stands on the screen, without the spaces at the ends of lines."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def read_until(self, wanted, seconds=240):
        """Read until the screen shows that text, and return all of it. Raises `AssertionError`."""
        until = time.monotonic() + seconds
        while wanted not in self.text:
            assert time.monotonic() < until, f"{wanted!r} is not on the screen:\n{self.text}"
            if select.select([self._descriptor], [], [], 0.5)[0]:
                self._take(os.read(self._descriptor, 65536))
        return self.text

    def _take(self, data):
        for sequence in UNKNOWN:
            data = data.replace(sequence, b"")
        self._stream.feed(data)
        for asked, answer in ANSWERS.items():
            if asked in data:
                os.write(self._descriptor, answer)
        if b"\x1b[6n" in data:
            cursor = self._screen.cursor
            os.write(self._descriptor, b"\x1b[%d;%dR" % (cursor.y + 1, cursor.x + 1))

    def type(self, text):
        """Type a line, and end it."""
        os.write(self._descriptor, text.encode())
        time.sleep(0.5)  # what comes at once would count as pasted, its end included
        os.write(self._descriptor, b"\r")


@contextmanager
def terminal(command, folder, **environment):
    """Run a command in a terminal, and kill it and its daemons at the end."""
    size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    environment |= {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **size}
    process, descriptor = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environment)
    try:
        termios.tcsetwinsize(descriptor, (LINES, COLUMNS))
        yield Terminal(descriptor)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(descriptor)
        end_daemons(folder)


def end_daemons(folder):
    """Kill what the program has installed in its home, below the folder, and left running."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().startswith(os.fsencode(f"{folder}/")):
                os.kill(int(file.parent.name), signal.SIGKILL)
        except OSError:  # it has ended meanwhile
            pass
