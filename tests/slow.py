"""Which cases `make test` leaves to `make test-all`: those that repeat what a few show already.

Knows the marker `slow`; knows no test.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Values for `parametrize`, all slow but those given."""
    return [v if v in but else pytest.param(v, marks=pytest.mark.slow) for v in values]
