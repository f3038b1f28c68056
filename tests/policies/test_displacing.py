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
    harness.step()
    harness.step()
    harness.add_request("upper", [2] * 20, max_tokens=2, priority=1, adapter_id="b")
    for _ in range(4):
        harness.step()
    assert "upper" in harness.finished
    assert lower.num_preemptions == 1
    harness.run_until_idle()


def test_a_reason_is_held_by_running_requests_or_no_preemption_cures_it() -> None:
    assert {reason for reason in WaitReason if reason.is_held_by_running} == SHORT.keys()
