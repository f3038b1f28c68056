"""The processes of the other ranks: started, told, watched and ended by the first one.

A rank reads what it is told from a socket, and ends when its standard input does: whatever becomes
of this process, none outlives it. Knows processes and messages; free of torch.
"""

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from aioserve.config import EngineConfig
from aioserve.errors import AioserveError, RunnerDeadError
from aioserve.runner.tensor_parallel.messages import (
    Answer,
    Message,
    Start,
    decode_answer,
    encode,
)

CLOSE_SECONDS = 5.0  # for ranks to give back what they have, before they are killed
REASON_SECONDS = 2.0  # to learn which rank it was that left


class OtherRanks:
    """All ranks but the first. Used on one thread at a time, but for `on_end`."""

    def __init__(
        self, module: str, config: EngineConfig, on_end: Callable[[RunnerDeadError], None]
    ) -> None:
        """Runs `module` for each, with the number of its socket. `on_end` is called, on a thread of
        its own, if one ends that was not told to.
        """
        self._size = config.runner.tensor_parallel_size
        self._timeout = config.runner.rank_timeout
        self._on_end = on_end
        self._is_closing = False
        self._news = threading.Condition()
        self._here: set[int] = set()
        self._loaded: set[int] = set()
        self._ended: dict[int, str] = {}  # and why
        self.kv_file = memory_file() if config.cache.kv_connector != "none" else -1
        self._folder = Path(tempfile.mkdtemp(prefix="aioserve-ranks-"))
        self.meeting = self._folder / "store"
        self._sockets: list[socket.socket] = []
        self._connections: list[Connection] = []  # on these
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        try:
            for rank in range(1, self._size):
                self._start(module, config, rank)
        except BaseException:
            self.close()
            raise

    def _start(self, module: str, config: EngineConfig, rank: int) -> None:
        ours, theirs = socket.socketpair()
        # Else a rank that reads nothing would hold this process up as soon as its socket is full.
        seconds, rest = divmod(self._timeout, 1)
        limit = struct.pack("ll", int(seconds), int(rest * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sockets.append(ours)
        self._connections.append(Connection(os.dup(ours.fileno())))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno(), *([self.kv_file] if self.kv_file >= 0 else [])],
                start_new_session=True,  # Ctrl-C is for the first rank, which drains before its end
                env={**os.environ, "TQDM_DISABLE": "1"},  # one bar is enough
            )
        self._processes.append(process)
        watcher = threading.Thread(
            target=self._watch, args=(rank, process), name=f"aioserve-rank-{rank}", daemon=True
        )
        self._watchers.append(watcher)
        watcher.start()
        self._send(rank, encode(Start(config, rank, str(self.meeting), self.kv_file)))

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks, in the order of their ranks."""
        return [process.pid for process in self._processes]

    def tell(self, message: Message) -> None:
        """Send a message to all other ranks. Raises `RunnerDeadError` if one is not there."""
        data = encode(message)
        for rank in range(1, self._size):
            self._send(rank, data)

    def wait_here(self) -> None:
        """Returns when all ranks come to the meeting, where it goes unnoticed if a rank has ended.
        Raises `RunnerDeadError` if one ends before.
        """
        self._wait(self._here)

    def wait_loaded(self) -> None:
        """Returns when all have. Raises `RunnerDeadError` if one ends before."""
        self._wait(self._loaded)
        self._leave_folder()

    def _wait(self, ranks: set[int]) -> None:
        """Wait until all ranks have come."""
        with self._news:
            self._news.wait_for(lambda: len(ranks) == self._size - 1 or self._ended)
            if self._ended:
                raise self._death()

    def why(self, error: Exception) -> Exception:
        """The cause of an `error` of the first rank: another rank that has ended, or the error
        itself.
        """
        with self._news:
            is_theirs = self._news.wait_for(lambda: self._ended, REASON_SECONDS)
            return self._death() if is_theirs else error

    def close(self) -> None:
        """End all ranks. Idempotent; waits for them, and kills those that take too long."""
        self._is_closing = True
        for ours in self._sockets:
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)  # wakes the readers, at both ends
        give_up = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for watcher in self._watchers:
            watcher.join()
        for connection, ours in zip(self._connections, self._sockets, strict=True):
            connection.close()
            ours.close()
        if self.kv_file >= 0:
            os.close(self.kv_file)
            self.kv_file = -1
        self._leave_folder()

    def _leave_folder(self) -> None:
        """Delete the folder of the ranks' meeting point, once no rank comes there any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._connections[rank - 1].send_bytes(data)
        except OSError as error:
            what = f"rank {rank} does not listen: {error}"
            if isinstance(error, BlockingIOError):
                what = f"rank {rank} has not listened for {self._timeout:g} s (runner.rank_timeout)"
            raise self.why(RunnerDeadError(what)) from error

    def _death(self) -> RunnerDeadError:
        rank, why = next(iter(self._ended.items()))
        return RunnerDeadError(f"rank {rank} of {self._size}: {why}")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """On a thread of its own, until the process ends."""
        connection, error = self._connections[rank - 1], None
        with contextlib.suppress(EOFError, OSError):
            while (error := (answer := decode_answer(connection.recv_bytes())).error) is None:
                with self._news:
                    (self._loaded if answer.has_loaded else self._here).add(rank)
                    self._news.notify_all()
        code = process.wait()
        with self._news:
            self._ended[rank] = error or f"process {process.pid} has ended, {_in_words(code)}"
            death = self._death()
            self._news.notify_all()
        if not self._is_closing:
            self._on_end(death)


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def memory_file() -> int:
    """A file without a name, in memory where the system has such files; its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("aioserve-kv")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class FirstRank:
    """The other end, in a process that `OtherRanks` has started."""

    def __init__(self, file: int) -> None:
        """From now on this process ends with its parent, and is deaf to what is meant for that."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        self._connection = Connection(file)

    def hear(self, decode: Callable[[bytes], Message]) -> Message:
        """The next message. Raises `EOFError` when there will be none."""
        try:
            return decode(self._connection.recv_bytes())
        except OSError:
            raise EOFError from None

    def answer(self, answer: Answer) -> None:
        """Send an answer to the first rank; it is dropped if that has ended."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(encode(answer))


def _end_with_parent() -> None:
    """Its end of our standard input is closed by whatever ends it."""
    while os.read(0, 1):
        pass
    os._exit(1)


def in_a_line(error: BaseException) -> str:
    """An error in one line; with its kind, unless it was raised on purpose."""
    text = " ".join(str(error).split())
    return text if isinstance(error, AioserveError) else f"{type(error).__name__}: {text}"
