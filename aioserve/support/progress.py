"""How long work shows that it goes on: a bar on a terminal, lines in a log.

A bar shows what lasts longer than a moment, and goes when that is done. In a log every stage has a
line when it is done, and one now and then before. Knows tqdm; knows no stage.
"""

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

SECONDS = 5.0  # between two lines of a stage

#: Options of tqdm.
BAR: dict[str, Any] = {
    "delay": 1.0,  # seconds until it shows
    "leave": False,
    "disable": None,  # where stderr is no terminal
}


class Interrupted(BaseException):
    """Work that shows how far it is was told to stop. It is no `Exception`: a stage which may fail,
    so that something else is tried, has not failed.
    """


_of_thread = threading.local()


@contextmanager
def interruptible(is_interrupted: threading.Event) -> Iterator[None]:
    """Inside the block, stages of this thread raise `Interrupted` before their next unit of work
    once `is_interrupted` is set.
    """
    _of_thread.is_interrupted = is_interrupted
    try:
        yield
    finally:
        del _of_thread.is_interrupted


def _go_on() -> None:
    is_interrupted: threading.Event | None = getattr(_of_thread, "is_interrupted", None)
    if is_interrupted is not None and is_interrupted.is_set():
        raise Interrupted


def show_no_bars() -> None:
    """Show no bars in this process, because another one shows the same."""
    BAR["disable"] = True


class Lines(Generic[T]):
    """A stage as lines: "Checking fused layers: 12 of 30, 10.1 s". Takes what tqdm would take."""

    def __init__(
        self,
        items: Iterable[T] = (),
        desc: str = "",
        total: int | None = None,
        *,
        say: Callable[[str], None] = logger.info,
        clock: Callable[[], float] = time.monotonic,
        **_look: Any,  # units and colours
    ) -> None:
        self._items, self._title = items, desc
        self._total = len(items) if total is None and isinstance(items, Sized) else total
        self._say, self._clock = say, clock
        self._num_done, self._began = 0, clock()
        self._last_said = self._began

    def __iter__(self) -> Iterator[T]:
        try:
            for item in self._items:
                yield item
                self.update()
        finally:
            self.close()

    def update(self, count: int = 1) -> None:
        """Note that `count` more are done."""
        self._num_done += count
        if self._clock() - self._last_said >= SECONDS and self._num_done != self._total:
            self._tell()

    def close(self) -> None:
        """There is no more to do, or it has failed: how far it came. Of nothing, nothing."""
        if self._total != 0:
            self._tell()

    def _tell(self) -> None:
        self._last_said = self._clock()
        of_all = "" if self._total is None else f" of {self._total}"
        seconds = self._last_said - self._began
        self._say(f"{self._title}: {self._num_done}{of_all}, {seconds:.1f} s")


def stage(items: Iterable[T], title: str, unit: str) -> Iterator[T]:
    """`items`, while a bar or lines show how far they are; `unit` is one of them."""
    if not sys.stderr.isatty():
        bar: Iterable[T] = Lines(items, title)
    else:
        bar = _tqdm(items, title, unit=unit, **BAR)
    for item in bar:
        _go_on()
        yield item


@contextmanager
def counted(total: int, title: str, unit: str) -> Iterator[Callable[[], Any]]:
    """Show the progress of work that is no list: the function is called whenever one more of
    `total` is done.
    """
    counter: Any = as_stage(_tqdm, (), {"desc": title, "total": total, "unit": unit})

    def count() -> None:
        _go_on()
        counter.update()

    try:
        yield count
    finally:
        counter.close()


def as_stage(bar: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the same for what `transformers` would show: a hook for its `set_tqdm_hook`."""
    _go_on()
    if not sys.stderr.isatty():
        return Lines(*arguments, **options)
    return bar(*arguments, **options | BAR)


def _tqdm(*arguments: Any, **options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(*arguments, **options)


def download_bars() -> Any:
    """Return a class of bars for `huggingface_hub`; None on a terminal: those that it has.

    It shows one of files, and some of bytes. Of the files, the last line is told, of bytes what is
    there meanwhile.
    """
    if sys.stderr.isatty():
        return None
    from huggingface_hub.utils import tqdm

    class Told(tqdm):  # its base does the counting, in whatever way this version of it counts
        monitor_interval = 0  # no thread

        def __init__(self, *items: Any, **options: Any) -> None:
            self.last_said = time.monotonic()
            super().__init__(*items, **options | {"file": io.StringIO(), "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if time.monotonic() - self.last_said >= SECONDS and "econstruct" not in self.desc:
                self.tell()

        def tell(self) -> None:
            self.last_said = time.monotonic()
            show = self.format_sizeof if self.unit == "B" else str
            of_all = f" of {show(self.total)}" if self.total else ""
            seconds = self.format_dict["elapsed"]
            title = self.desc.removesuffix(": ")
            logger.info("%s: %s%s, %.1f s", title, show(self.n), of_all, seconds)

        def close(self) -> None:
            if not self.disable and self.unit != "B":
                self.tell()
            super().close()

    return Told


class BesideBars(logging.StreamHandler[Any]):
    """Logs where bars may stand, which is on a terminal: takes them away for the time of a line."""

    def __init__(self, stream: Any = None) -> None:
        super().__init__(stream)
        self._is_terminal = self.stream is not None and self.stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record on a line of its own."""
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None) if self._is_terminal else None
        with nullcontext() if tqdm is None else tqdm.external_write_mode(file=self.stream):
            super().emit(record)
