"""Runs cases, and says which broke the promise of the package."""

import logging
import re
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aioserve.errors import AioserveError
from tests.fuzz.mutation import Mutator

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 60.0  # for a case, however busy the machine is; the slowest takes some 5


class HangError(BaseException):
    """A case did not end in time."""


class Target(ABC):
    """What reads. A case begins with a line that says which of its readers it is for."""

    name: str
    words: tuple[bytes, ...] = ()
    focus: int | None = None
    told = ""  # what `close` has to say of all cases

    def __init__(self, folder: Path) -> None:
        """Files go to `folder`, which is empty."""
        self.folder = folder

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Good cases, which need no place in the corpus as they are made here."""

    @abstractmethod
    def read(self, kind: str, data: bytes) -> None:
        """Returns, or raises what the reader raises."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what `read` has opened. May raise `AssertionError` for what it left behind."""


class Finding(NamedTuple):
    case: bytes
    what: str  # in a line
    error: BaseException | None

    @property
    def place(self) -> str:
        """What findings of one cause have in common."""
        if self.error is None:
            return self.what[:40]
        frames = traceback.extract_tb(self.error.__traceback__)
        ours = [frame for frame in frames if "/aioserve/" in frame.filename] or frames
        return f"{type(self.error).__name__} {ours[-1].filename}:{ours[-1].lineno}"


class _Watch:
    """What the interpreter tells of itself: it cannot be asked to stop, only not be listened to."""

    def __init__(self) -> None:
        self.folder: str | None = None  # where the case's files are; None: not listening
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "pickle.find_class":
            self.seen.append(f"unpickles {args[0]}.{args[1]}")
        elif event == "exec":
            file = str(getattr(args[0], "co_filename", ""))
            if file.startswith(self.folder) or "transformers_modules" in file:
                self.seen.append(f"runs {file}")


_watch: _Watch | None = None


class _Errors(logging.Handler):
    """What is logged as an error, or with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.seen.append(f"logs {record.getMessage()[:200]!r}")


class Runner:
    """One target and its cases."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.num_cases = self.num_refused = 0
        self.slowest, self.slowest_case = 0.0, b""
        self._mutator = Mutator(f"{target.name} {seed}", target.words, target.focus)
        self.corpus = [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))]
        self._pool = [*self.corpus, *target.seeds()]
        self._errors = _Errors()

    @property
    def num_given(self) -> int:
        """How many cases there are before the first one that is made."""
        return len(self._pool)

    def cases(self) -> Iterator[bytes]:
        """The corpus, what is made of it, and so on without an end."""
        yield from self._pool
        rng = self._mutator.rng
        while True:
            kind, _, data = rng.choice(self._pool).partition(b"\n")
            alike = [case for case in self._pool if case.partition(b"\n")[0] == kind]
            other = rng.choice(alike).partition(b"\n")[2]
            yield kind + b"\n" + self._mutator.mutated(data, other)

    def run(self, case: bytes) -> Finding | None:
        """What is wrong with it, if anything."""
        global _watch
        _watch = _watch or _Watch()
        kind, _, data = case.partition(b"\n")
        self.num_cases += 1
        began = time.monotonic()
        _watch.seen, self._errors.seen = [], []
        root = logging.getLogger()
        root.addHandler(self._errors)
        error: BaseException | None = None
        what = ""
        try:
            _watch.folder = str(self.target.folder)
            with bounded(SECONDS):
                self.target.read(kind.decode(), data)
        except AioserveError as refused:
            self.num_refused += 1
            if re.search(r"[\n\r]", str(refused)) or not str(refused):
                error, what = refused, "is refused in more than a line, or in none"
        except HangError:
            what = f"does not end in {SECONDS:g} s"
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # PanicException is no Exception
            line = " ".join(str(raised).split())[:200]
            error, what = raised, f"raises {type(raised).__name__}: {line}"
        finally:
            _watch.folder = None
            root.removeHandler(self._errors)
        if time.monotonic() - began > self.slowest:
            self.slowest, self.slowest_case = time.monotonic() - began, case
        what = what or next(iter([*_watch.seen, *self._errors.seen]), "")
        return Finding(case, what, error) if what else None


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises `HangError` inside after so long; on the main thread alone, where that can be done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
