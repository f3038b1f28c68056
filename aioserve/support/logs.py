"""The log of a server's processes: how its lines look, as text or as JSON, and who writes them.

Pipes, terminals and files are written to from a thread: what reads them may stand still, and what
does not fit its bounded queue is dropped and counted.
"""

import atexit
import contextlib
import io
import json
import logging
import os
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, BinaryIO, Literal, cast

from aioserve.support.progress import BesideBars

MAX_BYTES = 8 * 2**20  # that wait for a reader, unless the writer is told another bound
#: Seconds that the end of a process, or of what writes, waits for what still waits in the queue.
END_SECONDS = 1.0
# Written in one go: the kernel keeps that together where several processes share a pipe.
BATCH_BYTES = 4096


#: Lines that were dropped in this process, by the name of what they were meant for.
dropped_lines: Counter[str] = Counter()


class Gaps:
    """Is told when something is lost, on any thread; an exception of it is passed over."""

    def begins(self, error: OSError) -> None:
        """From here on something is lost, and nothing was just before."""

    def ends(self, num_lines: int, error: OSError) -> bytes:
        """It is written again, after `num_lines` that are lost; what stands in their place."""
        return b""


class BackgroundWriter:
    """One open file and the thread that writes to it. Any thread may call, and a signal handler."""

    def __init__(
        self,
        file: int | Callable[[], int],
        name: str,
        gaps: Gaps | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        encode: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """`file` is a descriptor, which stays its owner's, or a function that opens one on the
        thread: a FIFO without a reader may let it wait. `name` is that in `dropped_lines`. `encode`
        is called on the thread with each of the pieces.
        """
        self._name = name
        self._file, self._gaps, self._encode = file, gaps or Gaps(), encode
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._changed = threading.Condition()  # on a lock that a signal handler may take again
        self._pieces: deque[bytes] = deque()
        self._is_full = self._is_closed = False
        self._num_untold, self._error = 0, OSError()
        # A daemon: a process must not hang on a reader that stands still.
        self._thread = threading.Thread(
            target=self._run, name=f"aioserve-write-{name}", daemon=True
        )
        self._thread.start()

    def write(self, data: bytes) -> bool:
        """Queue whole lines, or a piece that means nothing in parts. False if it is dropped."""
        with self._changed:
            if self._is_closed:
                return False
            if not self._is_full and self._num_bytes + len(data) <= self._max_bytes:
                self._pieces.append(data)
                self._num_bytes += len(data)
                self._changed.notify_all()
                return True
            begins = self._lose(data, TimeoutError("its reader stands still"))
            # Room for one line would only alternate with none: the thread says when half is free.
            self._is_full = self._num_bytes > 0
        if begins:
            self._tell_begin()
        return False

    def wait_written(self, seconds: float) -> bool:
        """Wait until all that is queued is written, `seconds` at most; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_bytes, seconds)

    def close(self, seconds: float = END_SECONDS) -> bool:
        """Take no more, and wait until what is queued is written, `seconds` at most; whether it is.
        Idempotent.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _lose(self, data: bytes, error: OSError) -> bool:
        """Count what is dropped, with the lock held; whether it is the first of a gap."""
        num_lines = max(data.count(b"\n"), 1)
        begins = not self._num_untold
        dropped_lines[self._name] += num_lines
        self._num_untold += num_lines
        if begins:
            self._error = error
        return begins

    def _tell_begin(self) -> None:
        with contextlib.suppress(Exception):
            self._gaps.begins(self._error)

    # What follows runs on the thread.

    def _run(self) -> None:
        failure: OSError | None = None
        file = own = -1
        try:
            if isinstance(self._file, int):
                file = self._file
            else:
                file = own = self._file()
        except OSError as error:
            failure = error
        while pieces := self._take():
            lost = failure
            if lost is None:
                try:
                    _write_all(file, b"".join(map(self._encode, pieces)))
                except OSError as error:
                    lost = error
            self._put_down(pieces, lost)
        if own >= 0:
            os.close(own)

    def _take(self) -> list[bytes]:
        """Return what is to be written next; empty after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._is_closed)
            if not self._pieces:
                return []
            pieces = [self._pieces.popleft()]
            num_bytes = len(pieces[0])
            while self._pieces and num_bytes + len(self._pieces[0]) <= BATCH_BYTES:
                num_bytes += len(self._pieces[0])
                pieces.append(self._pieces.popleft())
            return pieces

    def _put_down(self, pieces: list[bytes], error: OSError | None) -> None:
        """Note that the pieces are written or lost, and that there may be room again."""
        num_bytes, begins, told = sum(map(len, pieces)), False, b""
        with self._changed:
            if error is not None:
                begins = any([self._lose(piece, error) for piece in pieces])
            has_room = self._num_bytes - num_bytes <= self._max_bytes // 2
            num_untold = self._num_untold if has_room and error is None else 0
        if begins:
            self._tell_begin()
        if num_untold:  # without the lock: a logger that is told has locks of its own
            with contextlib.suppress(Exception):
                told = self._gaps.ends(num_untold, self._error)
        with self._changed:
            if told:
                self._pieces.append(told)
            self._num_bytes += len(told) - num_bytes
            self._num_untold -= num_untold
            self._is_full = self._is_full and not has_room
            self._changed.notify_all()


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(file, rest) :]
        except BlockingIOError:  # another process that has the pipe wants it so
            poll = select.poll()
            poll.register(file, select.POLLOUT)
            poll.poll()


class _Stream(io.RawIOBase):
    """A stream in the place of the file below stdout or stderr."""

    def __init__(self, writer: BackgroundWriter, file: int) -> None:
        self._writer, self._file = writer, file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        if piece:
            self._writer.write(piece)
        return len(piece)

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return os.isatty(self._file)


_standard: dict[str, BackgroundWriter] = {}  # by the name of the stream
#: What else `wait_streams_written` calls, with the seconds that are left.
also_waited_for: list[Callable[[float], bool]] = []
_kept: dict[str, object] = {}  # what had their places: as garbage they would be closed


def write_streams_aside(gaps: Gaps | None = None) -> None:
    """From now on stdout and stderr of this process are written by threads: for processes that are
    a server's own. Idempotent. Streams that are not those of the process stay as they are.
    """
    if not _standard:
        atexit.register(_write_directly)
    for name in ("stdout", "stderr"):
        stream, own = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is None or stream is not own or name in _standard:
            continue
        try:
            stream.flush()
            file = stream.fileno()
        except (OSError, ValueError):
            continue
        writer = _standard.get("stdout")
        # Of one pipe for both, the order of lines is kept.
        if writer is None or not _is_same(file, sys.__stdout__):
            writer = BackgroundWriter(file, name, gaps)
        _standard[name] = writer
        _kept[name] = own
        aside = io.TextIOWrapper(
            cast(BinaryIO, _Stream(writer, file)),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, aside)


def _is_same(file: int, stream: Any) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.fstat(stream.fileno()))
    except (OSError, ValueError, AttributeError):
        return False


def _write_directly() -> None:
    """The process ends: what is printed later still is for nobody who waits."""
    if wait_streams_written():
        for name, own in _kept.items():
            setattr(sys, name, own)


def wait_streams_written(seconds: float = END_SECONDS) -> bool:
    """Wait until all that was printed and logged is written, `seconds` at most; whether it is."""
    deadline = time.monotonic() + seconds
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    waits = [*(writer.wait_written for writer in _standard.values()), *also_waited_for]
    return all([wait(max(deadline - time.monotonic(), 0.0)) for wait in waits])


# How lines of the log look, in every process of a server, as text or as JSON, and who writes them.
# A thread does: a log whose reader stands still holds up no request. Knows no settings, and no
# module that logs.


LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, process, message; and what the line is about, if the
    record has `fields`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return one line of the log, as a JSON object."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_log_level(level: str) -> None:
    """Set the lowest level that this package logs, in whatever way logging was set up."""
    logging.getLogger("aioserve").setLevel(level.upper())


class _LogGaps(Gaps):
    """Says in the log how many of its lines are missing."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._formatter = formatter

    def ends(self, num_lines: int, error: OSError) -> bytes:
        """Return a line in the place of those that are lost."""
        told = f"{num_lines} lines of the log were dropped here: {error.strerror or error}"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, told, None, None)
        return f"{self._formatter.format(record)}\n".encode()


def set_up_logging(level: str, log_format: LogFormat, process: str = "") -> None:
    """Log to stderr, by a thread, and print all else by it too: for processes that are a
    server's own. `process` names it in every line; empty: the engine's, which text need not say.
    """
    if log_format == "json":
        formatter: logging.Formatter = JsonFormatter(process or "engine")
    else:
        name = f"{process} " if process else ""
        formatter = logging.Formatter(f"%(asctime)s %(levelname)-7s {name}%(name)s: %(message)s")
    write_streams_aside(_LogGaps(formatter))
    handler = BesideBars()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
