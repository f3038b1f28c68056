"""At most `max_loras` adapters run together; a place goes to who is next in the policy's order."""

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.priority import PriorityScheduler

from aioserve.request import WaitReason
from aioserve.scheduler import BaseScheduler
from aioserve.testing import SchedulerHarness


def scheduler_of(harness: SchedulerHarness) -> BaseScheduler:
    assert isinstance(harness.scheduler, BaseScheduler)
    return harness.scheduler


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_an_adapter_without_a_place_waits_and_nobody_passes_it(pipeline_depth: int) -> None:
    harness = SchedulerHarness(
        ChunkedPrefillScheduler, max_loras=2, pipeline_depth=pipeline_depth, max_model_len=32
    )
    for name, adapter in (("r1", "a"), ("r2", "b"), ("r3", "a"), ("r4", "c"), ("r5", "")):
        harness.add_request(name, [1] * 5, max_tokens=6, adapter_id=adapter)
    harness.step()
    scheduler = scheduler_of(harness)
    assert [request.request_id for request in scheduler.running] == ["r1", "r2", "r3"]
    assert scheduler.running_adapters == {"a", "b"}
    assert scheduler.get_wait_reasons() == {
        "r4": WaitReason.ADAPTERS,
        "r5": WaitReason.ADAPTERS,  # first come, first served: r4 is what it waits behind
    }
    harness.finish("r2")
    harness.step()
    assert scheduler.running_adapters == {"a", "c"}
    harness.run_until_idle()
    assert len(harness.finished) == 5


def test_the_urgent_take_the_places_of_adapters_of_the_less_urgent() -> None:
    harness = SchedulerHarness(PriorityScheduler, max_loras=1, max_model_len=32)
    harness.add_request("low", [1] * 5, max_tokens=20, priority=5, adapter_id="a")
    harness.step()
    harness.add_request("equal", [2] * 5, max_tokens=3, priority=5, adapter_id="b")
    harness.step()
    scheduler = scheduler_of(harness)
    assert scheduler.get_wait_reasons() == {"equal": WaitReason.ADAPTERS}
    harness.add_request("high", [3] * 5, max_tokens=3, priority=1, adapter_id="c")
    harness.step()
    assert [request.request_id for request in scheduler.running] == ["high"]
    harness.run_until_idle()
    assert list(harness.finished.values()).count(harness.finished["low"]) == 3
