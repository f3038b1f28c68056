"""One engine's process, seen from the program that started it: its start, its log, its end.

Knows `Popen`, pipes and exit codes. Knows no request.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import IO

import msgspec

from aioserve.child.orders import Orders, send
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, EngineStartError
from aioserve.support.arguments import EXIT_USAGE

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 100  # bytes; Linux takes 107, other systems 103
MAX_LAST_WORDS = 8  # lines that are told of a process that has ended
# Seconds that it may take to end after its drain, before it is killed. Its own last resort is
# quicker.
ENDING_SECONDS = 15.0


class _LogLine(msgspec.Struct):
    """A line of the engine's log, as `log_format.JsonFormatter` writes it."""

    level: str
    logger: str
    message: str
    traceback: str = ""


_decoder = msgspec.json.Decoder(_LogLine)


class Child:
    """The process, from its start on. Any thread may call."""

    def __init__(self, config: EngineConfig) -> None:
        """Start it; `path` is where its socket will be. Raises `EngineStartError` if it cannot be
        started.
        """
        self._drain_timeout = config.server.drain_timeout
        own_folder = None
        if config.access.uds is None:
            own_folder = _private_folder()
            uds = os.path.join(own_folder, "engine.sock")
            access = msgspec.structs.replace(config.access, uds=uds)
            config = msgspec.structs.replace(config, access=access)
        self.path = str(config.access.uds)
        environment = dict(os.environ)
        environment.pop("AIOSERVE_API_KEYS", None)  # this program alone reaches the socket
        # What can be imported here can be imported there: a policy of a package of yours.
        here = [os.path.abspath(path) for path in sys.path]
        environment["PYTHONPATH"] = os.pathsep.join([*here, str(Path(__file__).parents[2])])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "aioserve.child.main"],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the program, which ends this one
            )
        except OSError as error:
            _remove(own_folder)
            raise EngineStartError(f"the engine's process cannot be started: {error}") from error
        pipe, log = self._process.stdin, self._process.stderr
        assert pipe is not None
        assert log is not None
        self._last_words: deque[str] = deque(maxlen=MAX_LAST_WORDS)
        self._reader = threading.Thread(
            target=_pass_on, args=(log, self._last_words), name="aioserve-child-log", daemon=True
        )
        self._reader.start()
        # For a program that ends, or forgets it, without `end`: the closed pipe ends the process.
        self._forgotten = weakref.finalize(self, _let_go, pipe, own_folder)
        with contextlib.suppress(OSError):  # it has ended already, and `ended` says why
            send(pipe, Orders(config, own_folder))

    @property
    def pid(self) -> int:
        """The process id of the engine."""
        return self._process.pid

    def ended(self, seconds: float = 0.0) -> str | None:
        """How it ended, in words, if it has or does within `seconds`; None while it lives."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)  # what it said last is on its way
        how = f"with exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):  # a number without a name
                how = f"by {signal.Signals(-code).name}"
        said = " / ".join(self._last_words)
        return f"the engine's process has ended {how}" + (f"; it said last: {said}" if said else "")

    def failure(self, how: str) -> ConfigError | EngineStartError:
        """The error that says why the process never served."""
        words = [line for line in self._last_words if line.startswith("aioserve: error: ")]
        if self._process.returncode == EXIT_USAGE and words:
            return ConfigError(words[-1].removeprefix("aioserve: error: "))
        return EngineStartError(how)

    def end(self) -> None:
        """Ask it to end, wait for that, and clear away what is left of it. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(self._drain_timeout + ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                logger.error("the engine's process does not end: it is killed")
                self.kill()
        self._reader.join(1.0)
        self._forgotten()

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._reader.join(1.0)
        self._forgotten()


def _private_folder() -> str:
    """A new one that no other user can open, with a path that leaves room for a socket's name."""
    folder = tempfile.mkdtemp(prefix="aioserve-")
    if len(os.fsencode(folder)) > MAX_SOCKET_PATH - len("/engine.sock"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="aioserve-", dir="/tmp")
    return folder


def _let_go(pipe: IO[bytes], own_folder: str | None) -> None:
    with contextlib.suppress(OSError):
        pipe.close()
    _remove(own_folder)


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _pass_on(log: IO[bytes], last_words: deque[str]) -> None:
    """Log what it logs, by the same loggers, so that the program's logging says what is shown. What
    is no line of a log, as an error at its end, is a warning, and kept.
    """
    with log:
        for data in log:
            text = data.decode("utf-8", "replace").rstrip()
            try:
                line = _decoder.decode(data)
                level = logging.getLevelNamesMapping()[line.level.upper()]
            except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError):
                if text:
                    last_words.append(text)
                    logger.warning("%s", text)
                continue
            if level >= logging.ERROR:
                last_words.append(line.message)
            told = f"{line.message}\n{line.traceback}" if line.traceback else line.message
            logging.getLogger(line.logger).log(level, "%s", told)
