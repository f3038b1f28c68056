"""What goes wrong, as data, and what is still to come.

Knows names of parts and kinds; knows nothing about the parts.
"""

import asyncio
import errno
import os
from collections import Counter

import msgspec


def planted(kind: str, where: str) -> BaseException:
    """What is raised; its words say that it was planted, and where, so that a log can be searched
    for them.
    """
    what = f"planted in {where}"
    errors: dict[str, BaseException] = {
        "raises": RuntimeError(what),
        "no memory": MemoryError(what),
        "cancelled": asyncio.CancelledError(what),
    }
    numbers = {"disk full": errno.ENOSPC, "no descriptors": errno.EMFILE, "reset": errno.ECONNRESET}
    if kind in numbers:
        return OSError(numbers[kind], f"{os.strerror(numbers[kind])}, {what}")
    return errors[kind]


#: What any call may do instead of what it should: raise one of these kinds, or take its time.
KINDS = ("raises", "no memory", "cancelled", "disk full", "no descriptors", "reset", "slow")
SLOW_SECONDS = 0.02


class Fault(msgspec.Struct, frozen=True):
    """`kind` happens in `part`, after that was passed `after` times more."""

    part: str
    kind: str
    after: int = 0

    def __str__(self) -> str:
        return f"{self.part}: {self.kind}"


class Faults:
    """Those that are to come, each once, and how often each came."""

    def __init__(self) -> None:
        self._armed: list[list[int | Fault]] = []  # passes that are left, and the fault
        #: By part and kind.
        self.injected: Counter[str] = Counter()
        #: Those that came, in order.
        self.came: list[Fault] = []
        #: Ids of requests that a fault has touched, of the faults that know their requests.
        self.touched: set[str] = set()

    def arm(self, fault: Fault) -> None:
        """Let the fault come once."""
        self._armed.append([fault.after, fault])

    def disarm(self) -> None:
        """Take back the fault that was to come."""
        self._armed.clear()

    def is_armed(self, part: str) -> bool:
        """Whether one is to come in this part."""
        return any(fault.part == part for _, fault in self._pairs())

    def comes(self, part: str) -> str | None:
        """A part is passed: the kind of fault that comes now, if one does."""
        found: str | None = None
        for entry in list(self._armed):
            left, fault = entry
            assert isinstance(fault, Fault)
            assert isinstance(left, int)
            if fault.part != part:
                continue
            if left or found is not None:
                entry[0] = max(left - 1, 0)
                continue
            found = fault.kind
            self._armed.remove(entry)
            self.injected[str(fault)] += 1
            self.came.append(fault)
        return found

    def _pairs(self) -> list[tuple[int, Fault]]:
        return [(left, fault) for left, fault in self._armed]  # type: ignore[misc]
