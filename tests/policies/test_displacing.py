"""Policies that displace make room for every reason to wait that running requests can cure."""

from typing import Any

import pytest
from aioserve.policies.mlfq import MLFQScheduler
from aioserve.policies.priority import PriorityScheduler

from aioserve.request import WaitReason
from aioserve.scheduler import BaseScheduler
from aioserve.testing import SchedulerHarness

#: Settings under which one running request holds all that there is of something.
SHORT: dict[WaitReason, dict[str, Any]] = {
    WaitReason.SEATS: {"max_num_seqs": 1},
    WaitReason.ADAPTERS: {"max_loras": 1},
    WaitReason.BLOCKS: {"num_blocks": 16},
    WaitReason.STATES: {"num_state_slots": 1},
    WaitReason.WINDOWS: {"window": 24, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("reason", SHORT)
@pytest.mark.parametrize(
    ("policy", "options"), [(PriorityScheduler, {}), (MLFQScheduler, {"quantum": 8})]
)
def test_an_upper_request_takes_what_a_lower_one_holds(
    policy: type[BaseScheduler], options: dict[str, Any], reason: WaitReason
) -> None:
    harness = SchedulerHarness(policy, options=options, **SHORT[reason])
    lower = harness.add_request("lower", [1] * 44, max_tokens=18, priority=5, adapter_id="a")
    for _ in range(10):  # until it has had enough that computing it again pays under mlfq
        harness.step()
    harness.add_request("upper", [2] * 20, max_tokens=2, priority=1, adapter_id="b")
    for _ in range(4):
        harness.step()
    assert "upper" in harness.finished
    assert lower.num_preemptions == 1
    harness.run_until_idle()


def test_nobody_is_preempted_for_a_request_that_does_not_fit_all_the_same() -> None:
    harness = SchedulerHarness(PriorityScheduler, num_blocks=20, watermark=0)
    least = harness.add_request("least", [1] * 26, max_tokens=3, priority=5)  # 7 blocks of 4
    first = harness.add_request("first", [2] * 44, max_tokens=4, priority=1)  # 12 blocks
    harness.step()
    between = harness.add_request("between", [3] * 38, max_tokens=2, priority=3)  # 10 blocks
    harness.step()
    assert between.wait_reason is WaitReason.BLOCKS
    harness.run_until_idle()
    assert least.num_preemptions == first.num_preemptions == 0


def test_a_request_that_holds_nothing_of_what_is_lacking_stays() -> None:
    """The least urgent request holds an adapter's place that another one keeps."""
    harness = SchedulerHarness(PriorityScheduler, max_loras=2)
    for name, adapter_id, priority in (("a", "x", 9), ("b", "y", 7), ("c", "x", 1)):
        harness.add_request(name, [1] * 5, max_tokens=9, priority=priority, adapter_id=adapter_id)
    harness.step()
    harness.add_request("urgent", [2] * 5, max_tokens=1, priority=3, adapter_id="z")
    harness.step()
    requests = {request.request_id: request for request in harness.scheduler.get_requests()}
    assert {name: r.num_preemptions for name, r in requests.items() if name != "urgent"} == {
        "a": 0,
        "b": 1,
        "c": 0,
    }
    harness.run_until_idle()
