"""Who is preempted is lost by nobody's mistake, and keeps its place in line."""

from typing import Any

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fair import FairScheduler
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.policies.latency_budget import LatencyBudgetScheduler
from aioserve.policies.prefix_aged import PrefixAgedScheduler
from aioserve.policies.priority import PriorityScheduler

from aioserve.errors import PolicyError
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.testing import SchedulerHarness
from aioserve.testing.toy_runner import Drafter

FULL = {
    "num_blocks": 10,
    "block_size": 16,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 256,
    "max_model_len": 160,
    "watermark": 0,
}


class RaisesAtPreemption(FCFSScheduler):
    """Cannot say where a request stands that ran before."""

    def order(self, request: Request) -> float:
        if request.status is RequestStatus.PREEMPTED:
            raise ValueError("no idea")
        return request.arrival_time


class ComparesNothing:
    def __lt__(self, other: Any) -> bool:
        raise ValueError("no idea")


class CannotCompareAtPreemption(FCFSScheduler):
    """Returns a key for a request that ran before that no other can be compared with."""

    def order(self, request: Request) -> Any:
        is_new = request.status is RequestStatus.WAITING
        return request.arrival_time if is_new else ComparesNothing()


def step_into_error(harness: SchedulerHarness) -> PolicyError:
    for _ in range(9):
        try:
            harness.step()
        except PolicyError as error:
            return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", [RaisesAtPreemption, CannotCompareAtPreemption])
def test_a_request_whose_preemption_fails_is_not_lost(
    policy: type[BaseScheduler], depth: int
) -> None:
    harness = SchedulerHarness(policy, **FULL, pipeline_depth=depth)
    for i, name in enumerate(("first", "second", "third")):
        harness.add_request(name, [i] * 79, max_tokens=40)
        harness.now += 1
    scheduler: Any = harness.scheduler
    assert "order()" in str(step_into_error(harness))
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    assert {r.request_id for r in (*running, *waiting)} == {"first", "second", "third"}
    assert all(r.status is RequestStatus.RUNNING and r.block_ids for r in running)
    assert scheduler.get_num_unfinished_requests() == 3
    scheduler.discard_step(harness.steps[-1].step_id)
    assert scheduler.get_num_unfinished_requests() == len(scheduler.running) + len(
        scheduler.waiting
    )


def test_a_failed_preemption_takes_nobody_along_who_relied_on_the_victim() -> None:
    class PreemptsAnOwner(ChunkedPrefillScheduler):
        """In its first step, of requests that share a prefix which this step computes."""

        def order(self, request: Request) -> float:
            if request.request_id == "c" and self.waiting and self.running:
                raise ValueError("no idea")
            return request.arrival_time

        def schedule(self) -> SchedulerOutput:
            if self.num_steps:
                return super().schedule()
            step = self.new_step()
            for request in self.waiting:
                step.admit(request)
            tokens, budget = step.requests, step.token_budget
            with pytest.raises(PolicyError):
                step.preempt(self.running[0])
            assert step.requests == tokens
            assert step.token_budget == budget
            return step.output()

    harness = SchedulerHarness(PreemptsAnOwner)
    for name in "abc":
        harness.add_request(name, [7] * 17, max_tokens=1)
    assert harness.schedule().num_scheduled_tokens == {"a": 17, "b": 1, "c": 1}
    harness.run_until_idle()


def test_order_sees_a_preempted_request_as_it_will_wait() -> None:
    seen: list[tuple[RequestStatus, int, int]] = []

    class Watches(FCFSScheduler):
        def order(self, request: Request) -> float:
            seen.append((request.status, request.num_preemptions, request.num_computed_tokens))
            return request.arrival_time

    harness = SchedulerHarness(Watches, **FULL)
    for i, name in enumerate(("first", "second")):
        harness.add_request(name, [i] * 80, max_tokens=40)
    harness.step()
    harness.step()
    assert seen[2:] == [(RequestStatus.PREEMPTED, 1, 0)]
    harness.run_until_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "policy",
    [
        FCFSScheduler,
        ChunkedPrefillScheduler,
        FairScheduler,
        LatencyBudgetScheduler,
        PrefixAgedScheduler,
        PriorityScheduler,
    ],
)
def test_a_newcomer_does_not_get_the_seat_of_the_preempted(
    policy: type[BaseScheduler], depth: int
) -> None:
    harness = SchedulerHarness(policy, **FULL, pipeline_depth=depth)
    for i, (name, length) in enumerate((("first", 80), ("second", 80), ("new", 16))):
        harness.add_request(name, [i] * length, max_tokens=40)
    for _ in range(6):
        harness.step()
    assert harness.requests["second"].num_preemptions == 1
    served = [name for step in harness.steps for name in step.num_scheduled_tokens]
    assert "new" not in served
    harness.run_until_idle()
    entered = [data.request_id for step in harness.steps for data in step.scheduled_new_reqs]
    assert entered[:4] == ["first", "second", "second", "new"]


def test_a_preempted_request_in_flight_stands_in_line_and_says_why() -> None:
    harness = SchedulerHarness(FCFSScheduler, **FULL, pipeline_depth=2)
    for i, name in enumerate(("first", "second")):
        harness.add_request(name, [i] * 80, max_tokens=40)
    harness.schedule()
    harness.schedule()  # "second" is preempted, and the first step still computes it
    scheduler: Any = harness.scheduler
    request = harness.requests["second"]
    assert list(scheduler.waiting) == [request]
    assert scheduler.get_wait_reasons() == {"second": WaitReason.IN_FLIGHT}
    num_tokens = scheduler.waiting.num_tokens
    harness.receive()
    assert scheduler.waiting.num_tokens == num_tokens + 1 == request.num_tokens
    harness.run_until_idle()


def test_a_request_preempted_just_now_says_so() -> None:
    harness = SchedulerHarness(FCFSScheduler, **FULL)
    for i, name in enumerate(("first", "second")):
        harness.add_request(name, [i] * 80, max_tokens=40)
    harness.step()
    harness.step()  # the first needs a sixth block, and the second has the last five
    assert harness.scheduler.get_wait_reasons() == {"second": WaitReason.PREEMPTED}
    harness.run_until_idle()


@pytest.mark.parametrize("ending", ["abort", "stop token", "deadline"])
def test_a_preempted_request_in_flight_may_end_before_it_runs_again(ending: str) -> None:
    harness = SchedulerHarness(FCFSScheduler, **FULL, pipeline_depth=2)
    harness.add_request("first", [0] * 80, max_tokens=40)
    any_token = tuple(range(50)) if ending == "stop token" else ()
    deadline = 1.0 if ending == "deadline" else None
    harness.add_request("second", [1] * 80, eos_token_ids=any_token, deadline=deadline)
    harness.schedule()
    harness.schedule()
    if ending == "abort":
        harness.finish("second")
    harness.receive()
    harness.step()
    assert "second" in harness.finished
    assert harness.requests["second"].num_preemptions == 1
    harness.run_until_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_under_priority_nobody_less_urgent_gets_the_place_of_a_preempted(depth: int) -> None:
    harness = SchedulerHarness(
        PriorityScheduler, num_blocks=12, block_size=4, max_num_seqs=2, pipeline_depth=depth
    )
    harness.add_request("low", [1] * 24, max_tokens=20, priority=5)
    harness.step()
    harness.add_request("high", [2] * 24, max_tokens=9, priority=1)
    harness.add_request("lower", [3] * 4, max_tokens=9, priority=6)
    harness.add_request("equal", [4] * 4, max_tokens=9, priority=5)
    harness.run_until_idle()
    entered = [data.request_id for step in harness.steps for data in step.scheduled_new_reqs]
    assert entered[:2] == ["low", "high"]
    assert entered.index("low", 1) < min(entered.index("lower"), entered.index("equal"))


def test_nobody_loses_its_place_for_a_guess() -> None:
    """With no block free, drafts that would need one stay behind, and what is known runs."""

    def plans(drafter: Drafter | None) -> tuple[int, int]:
        harness = SchedulerHarness(
            ChunkedPrefillScheduler, num_blocks=4, block_size=4, watermark=0, drafter=drafter
        )
        harness.add_request("short", [1, 2, 3, 4], max_tokens=5)
        harness.add_request("long", [5, 6, 7, 8], max_tokens=9)
        harness.run_until_idle()
        stats = harness.scheduler.make_stats()
        assert stats is not None
        return stats.num_preemptions, stats.num_draft_tokens

    assert plans(None) == (0, 0)
    num_preemptions, num_draft_tokens = plans(lambda token_ids: [1, 1, 1])
    assert num_preemptions == 0
    assert num_draft_tokens > 10
