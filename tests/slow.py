"""Which cases `make test` leaves to `make test-all`: those that repeat what a few show already.

Knows the marker `slow`; knows no test.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Values for `parametrize`, tuples if there are several names, all slow but those given."""

    def slow(value: Any) -> Any:
        several = value if isinstance(value, tuple) else (value,)
        return pytest.param(*several, marks=pytest.mark.slow)

    return [value if value in but else slow(value) for value in values]
