"""Timers: whoever is due is named, and whoever has ended is let go."""

import gc

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fair import FairScheduler

from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.scheduler.table import MIN_COMPACTED, Timers
from aioserve.testing import SchedulerHarness


def make_request(name: str, deadline: float | None = None) -> Request:
    return Request(RequestSpec(name, [1, 2, 3], SamplingParams(), deadline=deadline))


def test_the_due_are_named_once_and_in_order() -> None:
    timers = Timers(queue_timeout=5.0)
    late, early = make_request("late", 4.0), make_request("early", 3.0)
    for request in (late, early):
        timers.add(request)
    assert timers.take_due(2.9) == []
    assert timers.take_due(9.0) == [early, late]
    assert timers.take_due(9.0) == []


def test_the_queue_timeout_is_for_the_unserved_and_the_deadline_for_all() -> None:
    timers = Timers(queue_timeout=1.0)
    served, both = make_request("served"), make_request("both", 2.0)
    for request in (served, both):
        timers.add(request)
        request.status = RequestStatus.RUNNING
    assert timers.take_due(1.5) == []
    assert timers.take_due(2.5) == [both]


def test_a_heap_of_the_ended_does_not_grow() -> None:
    timers = Timers(queue_timeout=86_400.0)
    stays = make_request("stays", 100_000.0)
    timers.add(stays)
    for i in range(2000):
        request = make_request(str(i), 86_400.0)
        timers.add(request)
        timers.forget(request)
        assert len(timers) <= MIN_COMPACTED + 2
    assert timers.take_due(90_000.0) == [stays]  # its time in the queue
    assert timers.take_due(110_000.0) == [stays]  # its deadline


@pytest.mark.parametrize("policy", [ChunkedPrefillScheduler, FairScheduler])
def test_nothing_keeps_a_request_that_has_ended_however_far_its_deadline(
    policy: type[ChunkedPrefillScheduler],
) -> None:
    harness = SchedulerHarness(policy, num_blocks=400, queue_timeout=86_400.0)
    scheduler = harness.scheduler
    for i in range(300):
        spec = RequestSpec(
            f"r{i}",
            [i % 50] * 5,
            SamplingParams(max_tokens=3),
            deadline=86_400.0,
            user=f"u{i}",
            cache_salt="mine",
        )
        scheduler.add_request(Request(spec))
    for _ in range(9):
        output = scheduler.schedule()
        scheduler.update_from_output(output, harness.runner.execute(output))
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    del output
    gc.collect()
    mine = [x for x in gc.get_objects() if type(x) is Request and x.cache_salt == "mine"]
    assert mine == []
