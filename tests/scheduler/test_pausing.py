"""Pause: a request gives up its seat, keeps its blocks, and goes on where it stopped."""

from pathlib import Path
from typing import Any

import pytest

from aioserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import PolicyError
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.params import PoolingParams
from aioserve.scheduler import BaseScheduler, Request, RequestStatus, SchedulerOutput, WaitReason
from aioserve.scheduler.fallback import FallbackScheduler
from aioserve.testing import SchedulerHarness
from aioserve.testing.contract import PolicyContract

RECIPES = Path(__file__).parents[2] / "examples/recipes"
READING_SPEED = f"{RECIPES}/reading_speed.py:ReadingSpeedScheduler"


class PausingScheduler(BaseScheduler):
    """Order of arrival; those that are named in `asides` are paused, and not admitted."""

    asides: tuple[str, ...] = ()

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.running:
            if request.request_id in self.asides:
                step.pause(request)
        for request in self.waiting:
            if request.request_id not in self.asides and not step.admit(request):
                break
        return step.output()


class RestlessScheduler(BaseScheduler):
    """Pauses a different half of the running requests in every step, before or after their turn."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        turn = step.step_id
        if turn % 3 == 0:
            for request in self.running[turn % 2 :: 2]:
                step.pause(request)
        for request in step.run_decodes():
            step.run(request)
        if turn % 3 == 1:
            for request in self.running[turn % 2 :: 2]:
                step.pause(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        if turn % 5 == 0 and len(self.running) > 1:
            step.pause(self.running[0])
        return step.output()


@pytest.mark.slow
class TestContract(PolicyContract):
    policy = RestlessScheduler
    max_examples = 60
    # It pauses what has just displaced another request: that is waste, and not what it is for.
    test_no_step_wastes_what_requests_hold = None  # type: ignore[assignment]


def harness(**setup: Any) -> SchedulerHarness:
    return SchedulerHarness(PausingScheduler, block_size=4, **setup)


def pausing(found: SchedulerHarness, *names: str) -> PausingScheduler:
    """The harness' policy, from now on with these requests aside."""
    scheduler = found.scheduler
    assert isinstance(scheduler, PausingScheduler)
    scheduler.asides = names
    return scheduler


@pytest.mark.parametrize("depth", [1, 2])
def test_a_paused_request_gives_up_its_seat_and_goes_on_where_it_stopped(depth: int) -> None:
    found = harness(max_num_seqs=1, pipeline_depth=depth)
    request = found.add_request("a", list(range(10)), max_tokens=12)
    for _ in range(4):
        found.step()
    scheduler = pausing(found, "a")
    found.add_request("b", [7] * 9, max_tokens=5)
    while "b" not in found.finished:
        found.step()
    assert scheduler.paused_requests == [request]
    assert request.status is RequestStatus.PAUSED
    held, computed = request.block_ids.copy(), request.num_computed_tokens
    assert computed == 10 + len(found.tokens["a"]) - 1
    assert len(held) == -(-computed // 4)
    pausing(found)
    found.run_until_idle()
    (entered,) = [d for s in found.steps[1:] for d in s.scheduled_new_reqs if d.request_id == "a"]
    assert entered.num_computed_tokens == computed
    assert entered.block_ids[: len(held)] == held
    assert request.num_preemptions == 0
    assert request.num_cached_tokens == 0
    assert len(found.tokens["a"]) == 12


def test_why_it_waits_is_that_it_is_paused_until_a_step_has_no_room_for_it() -> None:
    found = harness(max_num_seqs=1)
    found.add_request("a", [1] * 5, max_tokens=8)
    found.step()
    pausing(found, "a")
    found.add_request("b", [2] * 5, max_tokens=8)
    found.step()
    found.step()
    assert found.scheduler.get_wait_reasons() == {"a": WaitReason.PAUSED}
    stats = found.scheduler.make_stats()
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_paused_reqs) == (1, 1, 1)
    pausing(found)
    found.step()
    assert found.scheduler.get_wait_reasons() == {"a": WaitReason.SEATS}
    found.run_until_idle()


@pytest.mark.parametrize("grows", [True, False])
def test_paused_requests_lose_their_blocks_before_a_running_one_does(grows: bool) -> None:
    """To a running request that grows, or to one that is admitted; the last in order first."""
    found = harness(num_blocks=12, max_model_len=40, enable_prefix_caching=False)
    paused = [found.add_request(name, [i] * 9, max_tokens=20) for i, name in enumerate("ab")]
    found.step()
    pausing(found, "a", "b")
    runs = found.add_request("c", [5] * 19, max_tokens=20 if grows else 1)
    if not grows:
        found.step()
        runs = found.add_request("d", [6] * 25, max_tokens=2)
        found.step()
        assert runs.status is RequestStatus.RUNNING
    while not paused[1].num_preemptions:
        found.step()
    assert [r.status for r in paused] == [RequestStatus.PAUSED, RequestStatus.PREEMPTED]
    assert runs.num_preemptions == 0
    assert not paused[1].block_ids
    pausing(found)
    found.run_until_idle()


def test_no_blocks_are_taken_from_the_paused_in_vain() -> None:
    found = harness(num_blocks=12, max_model_len=44, max_num_seqs=2, enable_prefix_caching=False)
    paused = found.add_request("a", [1] * 9, max_tokens=20)
    runs = found.add_request("b", [2] * 17, max_tokens=9)
    found.step()
    pausing(found, "a")
    found.add_request("c", [3] * 40, max_tokens=2)
    for _ in range(4):
        found.step()
    assert found.scheduler.get_wait_reasons()["c"] is WaitReason.BLOCKS
    assert (paused.status, runs.status) == (RequestStatus.PAUSED, RequestStatus.RUNNING)
    pausing(found)
    found.run_until_idle()


def test_a_request_that_cannot_be_kept_runs_on() -> None:
    """One whose states are added up over all its prompt, one that came in this step."""
    found = harness(max_num_batched_tokens=4)
    found.add_request("mean", [1] * 9, pooling_params=PoolingParams(pooling="mean"))
    found.add_request("logprobs", [2] * 9, max_tokens=3, prompt_logprobs=1)
    scheduler = pausing(found)
    step = scheduler.new_step()
    first, second = scheduler.waiting
    assert step.admit(first, 2)
    assert not step.pause(first)
    assert step.admit(second, 2)
    scheduler.book.commit(step.output(), [], 0)
    step = scheduler.new_step()
    assert not step.pause(first)
    assert not step.pause(second)
    assert not step.pause(Request(first.spec))


def test_a_deadline_passes_and_a_client_leaves_while_requests_are_paused() -> None:
    found = harness()
    for name, fields in (("late", {"deadline": 6.5}), ("left", {}), ("stays", {})):
        found.add_request(name, [len(name)] * 9, max_tokens=20, **fields)
    found.step()
    scheduler = pausing(found, "late", "left")
    for _ in range(2):
        found.step()
    assert len(scheduler.paused_requests) == 2
    found.finish("left")
    found.run_until_idle()
    assert found.finished == {"late": "timeout", "left": "abort", "stays": "length"}
    assert scheduler.paused_requests == []


def test_another_policy_goes_on_with_what_was_paused() -> None:
    found = harness(max_num_seqs=2)
    request = found.add_request("a", [1] * 9, max_tokens=9)
    found.step()
    pausing(found, "a")
    found.step()
    found.switch_policy(FallbackScheduler)
    found.run_until_idle()
    assert request.num_preemptions == 0
    assert len(found.tokens["a"]) == 9


def test_memory_is_given_back_by_paused_requests_as_well() -> None:
    """As when the server goes to sleep."""
    found = harness()
    request = found.add_request("a", [1] * 9, max_tokens=9)
    found.step()
    scheduler = pausing(found, "a")
    found.step()
    output = found.loop.vacate()
    found.planned.apply(output, set())
    assert scheduler.kv_cache.pool.num_used_blocks == 0
    assert request.status is RequestStatus.PREEMPTED
    pausing(found)
    found.run_until_idle()


def test_the_place_of_its_adapter_is_free_while_a_request_is_paused() -> None:
    found = harness(max_loras=1)
    found.add_request("a", [1] * 5, max_tokens=9, adapter_id="one")
    found.step()
    scheduler = pausing(found, "a")
    found.add_request("b", [1] * 5, max_tokens=9, adapter_id="two")
    found.step()
    found.step()
    assert scheduler.running_adapters == {"two"}
    pausing(found)
    found.step()
    assert found.scheduler.get_wait_reasons() == {"a": WaitReason.ADAPTERS}
    found.run_until_idle()


def test_what_a_request_was_to_compute_in_the_step_is_refunded() -> None:
    """And requests that begin behind it wait as well."""
    found = SchedulerHarness(PausingScheduler, block_size=4, max_num_batched_tokens=16)
    found.add_request("a", [1] * 30, max_tokens=2)
    found.step()
    found.add_request("b", [1] * 30, max_tokens=2)
    scheduler = pausing(found)
    step = scheduler.new_step()
    (first,) = scheduler.running
    assert step.run(first, 8) == 8
    (second,) = scheduler.waiting
    assert step.admit(second) == 6  # behind what the first computes
    assert second.num_computed_tokens == 30
    assert step.pause(first)
    assert step.token_budget == 16
    assert first.num_computed_tokens == 16
    assert second.status is RequestStatus.WAITING
    assert scheduler.memory.paused == 32
    output = step.output()
    assert output.paused_req_ids == output.preempted_req_ids == ["a"]
    found.planned.apply(output, set())
    found.runner.execute(output)
    found.run_until_idle()


def test_a_policy_that_cannot_put_it_in_line_has_not_paused_it() -> None:
    class Failing(PausingScheduler):
        fails = False

        def order(self, request: Request) -> float:
            return 1 / (not self.fails)

    found = SchedulerHarness(Failing)
    found.add_request("a", [1] * 5, max_tokens=3)
    found.step()
    scheduler = found.scheduler
    assert isinstance(scheduler, Failing)
    scheduler.fails = True
    step = scheduler.new_step()
    (request,) = scheduler.running
    with pytest.raises(PolicyError, match="raised ZeroDivisionError"):
        step.pause(request)
    assert request.status is RequestStatus.RUNNING
    assert scheduler.running == [request]
    assert not scheduler.paused_requests


def test_a_log_says_who_was_paused_and_replays_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    settings = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        cache=CacheConfig(num_kv_blocks=64, block_size=16),
        scheduler=SchedulerConfig(policy=READING_SPEED, max_num_seqs=1, decision_log=str(path)),
    )
    requests = (
        WorkloadRequest(0.0, (Piece(1, 20),), 400),
        WorkloadRequest(0.5, (Piece(2, 20),), 20),
    )
    outcome = simulate(settings, Workload("w", requests))
    assert outcome.requests[1].ttft < 0.3
    assert outcome.num_preemptions == 0
    log = DecisionLog(path)
    assert replay(log).divergence is None
    chronicle = Chronicle(log.header)
    for record in log:
        chronicle.feed(record)
    phases = [phase for _, phase in chronicle.lives[0].phases]
    assert phases[:5] == ["queued", "prefill", "decode", "paused", "decode"]
    assert chronicle.lives[0].num_preemptions == 0
