"""Which cases `make test` leaves to `make test-all`: those that repeat what a few show already.

Knows the marker `slow`, how many random examples are few, and how to pass over what -m leaves out
before it is made; knows no test.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any

import pytest

#: What the contract of policies checks at depth 1 alone.
_IN_PROCESSES = "test_plans_are_the_same_in_every_process"
_MEMORY = "test_memory_does_not_grow_with_requests_that_have_ended"
#: What takes long, of which policies `make test` asks it.
_OF_FEW = {_IN_PROCESSES: ("fcfs", "fair"), _MEMORY: ("fcfs", "fair", "mlfq")}
_AT_DEPTH_ONE = (
    "test_schedule_costs_in_proportion_to_the_requests",
    *_OF_FEW,
)
#: What all policies share, and what random traffic brings as well: `make test` does not ask it of
#: policies that put requests in another order alone, or give prompts other budgets.
_SHARED = {
    "test_blocks_from_outside_are_as_good_as_computed_ones",
    "test_images_that_run_whole_are_not_split",
    "test_no_step_wastes_what_requests_hold",
    "test_states_are_those_of_the_tokens_before",
    "test_what_a_policy_swaps_comes_back_whole",
    "test_windows_hold_what_their_tokens_see",
}
_ALIKE = ("deadline", "hrrn", "latency_budget", "prefix_aged", "priority")


def mostly_slow(values: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Values for `parametrize`, tuples if there are several names, all slow but those given."""

    def slow(value: Any) -> Any:
        several = value if isinstance(value, tuple) else (value,)
        return pytest.param(*several, marks=pytest.mark.slow)

    return [value if value in but else slow(value) for value in values]


_is_slow_left_out = False


def remember(config: pytest.Config) -> None:
    """Let `examples` know whether this run leaves out what is slow. Before tests are imported."""
    global _is_slow_left_out
    _is_slow_left_out = "not slow" in config.option.markexpr


def examples(few: int, *, slow: int) -> int:
    """Return how many random examples a test tries: `few` where what is slow is left out, as in
    `make test`, and `slow` in every other run.
    """
    return few if _is_slow_left_out else slow


def mark_twins_of_depth_one(items: Iterable[pytest.Item]) -> None:
    """Mark slow what the contract of a policy checks with two steps in flight as well; of fcfs, and
    of the policies of tests/testing, `make test` checks both. What takes long it asks of a few
    policies alone.
    """
    for item in items:
        if not isinstance(item, pytest.Function) or "pipeline_depth" not in item.fixturenames:
            continue
        params = item.callspec.params if hasattr(item, "callspec") else {}
        kinds = {base.__name__ for base in item.cls.__mro__} if item.cls else set()
        both = params.get("name") == "fcfs" or "TestWhoRefusesMany" in kinds
        if "PolicyContract" in kinds and item.originalname in _OF_FEW:
            if params.get("name") not in _OF_FEW[item.originalname]:
                item.add_marker(pytest.mark.slow)
        if item.originalname in _SHARED and params.get("name") in _ALIKE:
            item.add_marker(pytest.mark.slow)
        if "PolicyContract" in kinds and params.get("pipeline_depth") == 1 and not both:
            if item.originalname not in _AT_DEPTH_ONE:
                item.add_marker(pytest.mark.slow)


def left_out(config: pytest.Config) -> set[str]:
    """Return the markers whose tests are left out, if that is all that -m says: most tests are, and
    to make each one first takes a worker of `make test` two seconds.
    """
    expression = config.option.markexpr
    plain = re.fullmatch(r"not \w+( and not \w+)*", expression)
    return set(re.findall(r"not (\w+)", expression)) if plain else set()


def is_left_out(test: Any, markers: set[str]) -> bool:
    """Return whether a class or function of tests has one of these markers on itself."""
    marks = getattr(test, "pytestmark", [])
    return isinstance(marks, list) and any(mark.name in markers for mark in marks)


def leave_out_cases(metafunc: pytest.Metafunc) -> None:
    """Drop the cases that -m leaves out before a test is made of each; of none at all pytest would
    make a test without values, so one stays, which is dropped later. A case that is dropped here is
    not found by its node id either.
    """
    markers, cases = left_out(metafunc.config), getattr(metafunc, "_calls", None)
    if cases is None:  # another pytest: `leave_out` drops the tests that are made
        return
    kept = [case for case in cases if all(mark.name not in markers for mark in case.marks)]
    metafunc._calls = kept or cases[:1]


def leave_out(items: list[pytest.Item], config: pytest.Config) -> None:
    """Drop the tests that -m leaves out, which pytest would do after it has put all in order."""
    markers = left_out(config)
    dropped = [item for item in items if any(mark.name in markers for mark in item.iter_markers())]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]
