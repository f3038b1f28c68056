"""Which cases `make test` leaves to `make test-all`: those that repeat what a few show already.

Knows the marker `slow`; knows no test.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

#: What the contract of policies checks at depth 1 alone.
_IN_PROCESSES = "test_plans_are_the_same_in_every_process"
_AT_DEPTH_ONE = (
    "test_schedule_costs_in_proportion_to_the_requests",
    "test_memory_does_not_grow_with_requests_that_have_ended",
    _IN_PROCESSES,
)


def mostly_slow(values: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Values for `parametrize`, tuples if there are several names, all slow but those given."""

    def slow(value: Any) -> Any:
        several = value if isinstance(value, tuple) else (value,)
        return pytest.param(*several, marks=pytest.mark.slow)

    return [value if value in but else slow(value) for value in values]


def mark_twins_of_depth_one(items: Iterable[pytest.Item]) -> None:
    """Mark slow what the contract of a policy checks with two steps in flight as well; of fcfs, and
    of the policies of tests/testing, `make test` checks both. What starts two processes it asks of
    two policies alone.
    """
    for item in items:
        if not isinstance(item, pytest.Function) or "pipeline_depth" not in item.fixturenames:
            continue
        params = item.callspec.params if hasattr(item, "callspec") else {}
        kinds = {base.__name__ for base in item.cls.__mro__} if item.cls else set()
        both = params.get("name") == "fcfs" or "TestWhoRefusesMany" in kinds
        if "PolicyContract" in kinds and item.originalname == _IN_PROCESSES:
            if params.get("name") not in ("fcfs", "fair"):
                item.add_marker(pytest.mark.slow)
        if "PolicyContract" in kinds and params.get("pipeline_depth") == 1 and not both:
            if item.originalname not in _AT_DEPTH_ONE:
                item.add_marker(pytest.mark.slow)
