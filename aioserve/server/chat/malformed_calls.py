"""Counts tool calls that a model wrote wrong, for /metrics.

Knows two ways of it: text that began as a call and is none, and arguments that are no JSON object.
"""

from collections import Counter
from typing import Literal

from aioserve.operations.command import Counted

Way = Literal["call", "arguments"]


class MalformedCalls:
    """Counts of one application, since the process began. Counts nothing without a format."""

    def __init__(self, name: str | None) -> None:
        """`name`: of the format that reads the calls."""
        self._name = name
        self._counts: Counter[Way] = Counter()

    def add(self, way: Way, number: int = 1) -> None:
        """Count calls that came as text (`call`), or with arguments that are no JSON object."""
        self._counts[way] += number

    def tell(self) -> list[Counted]:
        """The counts with their labels, for metrics."""
        told = "Tool calls that the model wrote wrong"
        ways: tuple[Way, ...] = ("call", "arguments")
        counted = Counted("malformed_tool_calls", told, ("format", "part"), [])
        if self._name is not None:
            counted.counts += [((self._name, way), self._counts[way]) for way in ways]
        return [counted]
