"""Runs chat templates in processes of its own, which end when one asks too much.

A template is a program that comes with a model. Whatever it does, its seconds of CPU
time, its memory and its characters are bounded: limits of a process hold for all that Jinja can do.
The first text starts a process, which stays for the next ones. Knows nothing about conversations.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aioserve.errors import RequestError, TemplateStalledError
from aioserve.support.process import LOOK_SECONDS, ProcessWatch, StandsStillError

# The program, and its words: it imports nothing of aioserve, and is not imported here.
PROGRAM = Path(__file__).with_name("template_process.py")
HEAD = struct.Struct("<cdQ")
RENDER, NAMES = b"R", b"N"
TEXT, REFUSAL, TOO_LONG = b"T", b"F", b"L"

# Of CPU time, however busy the machine is. A message takes some 50 microseconds.
TEMPLATE_SECONDS = 5.0
MAX_TEXT = 2**26  # characters that a template may put together
MAX_BYTES = 2**30  # of the process's address space; it begins with some 40 MB
MAX_PROCESSES = 3  # at once; a further text waits for one
# For an answer, however busy the machine is.
PATIENCE_SECONDS = 60.0
# Looks in a row that find the template process waiting without any CPU time in between, before it
# counts as standing still.
MAX_LOOKS_IDLE = 40
# What the process needs to find Python, Jinja and the time; what else there is may be secret.
ENVIRONMENT = ["HOME", "LANG", "LC_ALL", "LC_TIME", "PATH", "TZ"]
ENVIRONMENT += ["LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH"]


class TemplateTooSlowError(RequestError):
    """A template took more time than it was given."""


class TemplateRenderer:
    """A renderer of templates, to be called from any thread but an event loop's: it blocks the
    caller.
    """

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds` of CPU time are for one text; None: as many as there are by default."""
        self._seconds = TEMPLATE_SECONDS if seconds is None else seconds
        self._idle: list[_Process] = []
        self._room = threading.BoundedSemaphore(MAX_PROCESSES)
        self.close = weakref.finalize(self, _end_all, self._idle)

    def render(self, source: str, names: Mapping[str, Any]) -> str:
        """Return the text. Raises `RequestError` if the template does, or asks too much,
        `TemplateTooSlowError` if it has not ended in time, and `TemplateStalledError` if its
        process stood still, for which it is ended.
        """
        return self._ask(RENDER, source, names)

    def names_read(self, source: str) -> frozenset[str]:
        """Names of variables a template reads; none if it is invalid. Raises as `render` does."""
        return frozenset(json.loads(self._ask(NAMES, source, {})))

    def _ask(self, kind: bytes, source: str, names: Mapping[str, Any]) -> str:
        try:
            data = _encode([source, names]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"a template can be given JSON only: {error}", "messages") from error
        with self._room:
            try:
                process = self._idle.pop()
            except IndexError:
                process = None
            if process is not None:
                # One that has ended while there was nothing to do is no fault of this template.
                with suppress(_EndedError):
                    return self._answer(process, kind, data)
            try:
                return self._answer(_Process(), kind, data)
            except _EndedError as error:
                raise RequestError(
                    f"the chat template ended the process that renders it: {error}", "messages"
                ) from None

    def _answer(self, process: "_Process", kind: bytes, data: bytes) -> str:
        try:
            answer, text = process.ask(kind, self._seconds, data)
        except BaseException:
            process.end()
            raise
        if answer in (TEXT, REFUSAL):
            self._idle.append(process)
            if not self.close.alive:  # meanwhile
                _end_all(self._idle)
        else:
            process.end()
        if answer == TEXT:
            return text
        if answer == REFUSAL:
            raise RequestError(f"the chat template refused{text}", "messages")
        if answer == TOO_LONG:
            raise RequestError("the text of the chat template is too long", "messages")
        raise RequestError(
            f"the chat template needs more than the {MAX_BYTES / 2**30:g} GiB of memory that it "
            "may have",
            "messages",
        )


class _EndedError(Exception):
    """The process has ended, by itself or by another process."""


class _Process:
    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    # Not as a module: the package that it would stand in takes half a second.
                    [
                        *(sys.executable, "-P", str(PROGRAM)),
                        *map(str, (theirs.fileno(), MAX_TEXT, MAX_BYTES)),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for this process, which drains first
                    env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                )
        except BaseException:
            self._line.close()
            raise
        self._line.settimeout(LOOK_SECONDS)

    def ask(self, kind: bytes, seconds: float, data: bytes) -> tuple[bytes, str]:
        watch = ProcessWatch(self._process.pid, PATIENCE_SECONDS, MAX_LOOKS_IDLE)
        try:
            rest = memoryview(HEAD.pack(kind, seconds, len(data)) + data)
            while rest:
                rest = rest[watch.wait(partial(self._line.send, rest)) :]
            received = bytearray()
            size = HEAD.size
            while len(received) < size:
                size_asked = 2**16 if size < 2**20 else 2**20
                piece = watch.wait(partial(self._line.recv, size_asked))
                if not piece:
                    raise ConnectionResetError
                received += piece
                if size == HEAD.size <= len(received):
                    size += HEAD.unpack_from(received)[2]
                    if size > HEAD.size + 4 * MAX_TEXT:
                        return TOO_LONG, ""
        except StandsStillError:
            raise TemplateStalledError(
                "the process that renders chat templates did not respond and was ended: try again"
            ) from None
        except TimeoutError:
            raise TemplateTooSlowError("the chat template takes too long", "messages") from None
        except ConnectionError:
            self._process.wait()
            code = self._process.returncode
            if code == -signal.SIGPROF:
                raise TemplateTooSlowError("the chat template takes too long", "messages") from None
            raise _EndedError(
                f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            ) from None
        answer: bytes = HEAD.unpack_from(received)[0]
        with memoryview(received) as view:
            return answer, str(view[HEAD.size :], "utf-8", "surrogatepass")

    def end(self) -> None:
        """Idempotent; takes no longer than to be killed."""
        self._line.close()
        self._process.kill()
        self._process.wait()


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()


def _plain(value: Any) -> Any:
    """Return what JSON has no word for."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} has no form in JSON")


_encode = json.JSONEncoder(default=_plain).encode
