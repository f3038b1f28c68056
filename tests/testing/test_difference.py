"""What is said of two plans that differ: the field and the requests, not the plans."""

import msgspec
import pytest
from aioserve.policies.fcfs import FCFSScheduler

from aioserve.scheduler import SchedulerOutput
from aioserve.testing import SchedulerHarness
from aioserve.testing.comparisons import differences


@pytest.fixture
def plan() -> SchedulerOutput:
    harness = SchedulerHarness(FCFSScheduler)
    for name, length in (("a", 3), ("b", 5)):
        harness.add_request(name, [1] * length)
    return harness.schedule()


def test_equal_plans_differ_in_nothing(plan: SchedulerOutput) -> None:
    assert differences(plan, plan) == ""


def test_requests_with_other_tokens_are_named(plan: SchedulerOutput) -> None:
    other = msgspec.structs.replace(plan, num_scheduled_tokens={"b": 2, "c": 1})
    told = differences(plan, other)
    assert told == "tokens: a gets 3 instead of 0, b gets 5 instead of 2, c gets 0 instead of 1"


def test_rows_in_another_order_are_told(plan: SchedulerOutput) -> None:
    turned = dict(reversed(plan.num_scheduled_tokens.items()))
    other = msgspec.structs.replace(plan, num_scheduled_tokens=turned)
    assert differences(plan, other) == "rows: ['a', 'b'] instead of ['b', 'a']"


def test_any_other_field_is_told_by_its_name(plan: SchedulerOutput) -> None:
    other = msgspec.structs.replace(plan, finished_req_ids=["x"])
    assert differences(plan, other) == "finished_req_ids: [] instead of ['x']"
    other = msgspec.structs.replace(plan, preempted_req_ids=["x"])
    assert differences(plan, other) == "preempts: [] instead of ['x']"
