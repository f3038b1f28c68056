"""How long work shows that it goes on: a bar on a terminal, lines in a log.

A bar shows what lasts longer than a moment, and goes when that is done. In a log every stage has a
line when it is done, and one now and then before. Knows tqdm; knows no stage.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
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
        """So many more are done."""
        self._num_done += count
        if self._clock() - self._last_said >= SECONDS and self._num_done != self._total:
            self._tell()

    def close(self) -> None:
        """There is no more to do, or it has failed: how far it came."""
        self._tell()

    def _tell(self) -> None:
        self._last_said = self._clock()
        of_all = "" if self._total is None else f" of {self._total}"
        seconds = self._last_said - self._began
        self._say(f"{self._title}: {self._num_done}{of_all}, {seconds:.1f} s")


def stage(items: Iterable[T], title: str, unit: str) -> Iterable[T]:
    """`items`, while a bar or lines show how far they are; `unit` is one of them."""
    if not sys.stderr.isatty():
        return Lines(items, title)
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, title, unit=unit, **BAR)
    return bar


def as_stage(bar: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The same for what `transformers` would show: a hook for its `set_tqdm_hook`."""
    if not sys.stderr.isatty():
        return Lines(*arguments, **options)
    return bar(*arguments, **options | BAR)
