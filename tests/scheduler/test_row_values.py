"""A policy gets back the values of rows that it wants, and nothing where it wants none."""

from typing import Any

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve.errors import ConfigError
from aioserve.request import MAX_INVENTED, ROW_VALUES, invented
from aioserve.testing import SchedulerHarness

HEAD = "tests.runner.cpu.test_row_values:margin"


class Wanting(ChunkedPrefillScheduler):
    wants_row_values = ("entropy", HEAD)


@pytest.mark.parametrize("depth", [1, 2])
def test_values_come_with_each_token_and_are_those_of_the_newest(depth: int) -> None:
    harness = SchedulerHarness(Wanting, max_num_batched_tokens=8, pipeline_depth=depth)
    request = harness.add_request("a", [5] * 20, max_tokens=8)
    seen = []
    while "a" not in harness.finished:
        assert (request.row_values == {}) == (request.num_output_tokens == 0)
        if request.num_output_tokens:
            assert request.row_values == invented(Wanting.wants_row_values, request.token_ids, 0)
            assert all(0 <= value <= MAX_INVENTED for value in request.row_values.values())
        seen.append(dict(request.row_values))
        harness.step()
    assert len({tuple(values.values()) for values in seen}) > 5
    assert all(set(step.parts[ROW_VALUES]) == {"a"} for step in harness.steps if step.parts)


def test_a_policy_that_wants_none_gets_none_and_costs_no_part() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler)
    request = harness.add_request("a", [5] * 3, max_tokens=4)
    harness.run_until_idle()
    assert not any(step.parts for step in harness.steps)
    assert request.row_values == {}


def test_a_policy_that_takes_over_gets_the_values_that_it_wants() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler)
    request = harness.add_request("a", [5] * 3, max_tokens=9)
    harness.step()
    harness.step()
    assert request.row_values == {}
    harness.switch_policy(Wanting)
    harness.step()
    assert set(request.row_values) == {"entropy", HEAD}
    harness.run_until_idle()


@pytest.mark.parametrize("names", ["entropy", ["entropy"], (3,), ("entrpy",), ("entropy",) * 9])
def test_what_names_no_value_is_refused_before_the_policy_plans(names: Any) -> None:
    class Confused(ChunkedPrefillScheduler):
        wants_row_values = names

    with pytest.raises(ConfigError, match="policy Confused: wants_row_values"):
        SchedulerHarness(Confused)
    harness = SchedulerHarness(ChunkedPrefillScheduler)
    with pytest.raises(ConfigError, match="policy Confused: wants_row_values"):
        harness.switch_policy(Confused)
