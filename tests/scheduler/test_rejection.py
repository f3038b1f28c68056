"""Policies reject requests early, say when to be asked again, and hear of every end."""

from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.errors import PolicyError, RequestRejectedError
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.testing import SchedulerHarness

RECIPES = Path(__file__).parents[2] / "examples/recipes"
GATHERED = f"{RECIPES}/gathered_batch.py:GatheredBatchScheduler"
ONE_AT_A_TIME = '''
from aioserve.scheduler import BaseScheduler, SchedulerOutput


class OneAtATime(BaseScheduler):
    """Whoever finds another one there is turned away."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if self.running:
                step.reject(request, "another one is there", retry_after=7)
            else:
                step.admit(request)
        return step.output()
'''


WAITS = '''
from aioserve.scheduler import BaseScheduler, SchedulerOutput


class Waits(BaseScheduler):
    """Holds requests of one client back, until a time."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if request.user == "slow":
                self.wake_at(TIME)
            else:
                step.admit(request)
        return step.output()
'''


class Rejecting(BaseScheduler):
    """Rejects whoever has priority 1, and notes who has ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended: list[tuple[str, str, int]] = []
        self.answers: list[bool] = []

    def on_finish(self, request: Request, reason: str) -> None:
        self.ended.append((request.request_id, reason, request.num_output_tokens))

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in list(self.waiting):
            if request.priority == 1:
                self.answers.append(step.reject(request, "low"))
            if request.priority != 1 or request.request_id.startswith("both"):
                step.admit(request)
        return step.output()


def config(policy: str, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(policy=policy, **scheduler),
    )


def one_at_a_time(tmp_path: Path) -> str:
    file = tmp_path / "one.py"
    file.write_text(ONE_AT_A_TIME)
    return f"{file}:OneAtATime"


def test_what_was_admitted_all_the_same_is_not_rejected() -> None:
    harness = SchedulerHarness(Rejecting)
    harness.add_request("both", [1, 2], max_tokens=3, priority=1)
    harness.run_until_idle()
    assert harness.ledger.lives["both"].finish_reason == "length"


def test_a_request_that_has_run_is_not_rejected() -> None:
    harness = SchedulerHarness(Rejecting)
    harness.add_request("both", [1, 2], max_tokens=3, priority=1)
    harness.step()
    scheduler = harness.scheduler
    assert isinstance(scheduler, Rejecting)
    step = scheduler.new_step()
    [request] = scheduler.running
    assert not step.reject(request, "too late")
    step.preempt(request)
    assert request.status is RequestStatus.PREEMPTED
    assert not step.reject(request, "too late")


def test_a_policy_hears_of_every_end_once_with_its_reason_before_its_next_step() -> None:
    harness = SchedulerHarness(Rejecting)
    for name, priority in (("a", 0), ("b", 1), ("c", 0)):
        harness.add_request(name, [1, 2], max_tokens=3, priority=priority)
    harness.step()
    harness.finish("c")
    harness.run_until_idle()
    harness.add_request("d", [1, 2], max_tokens=1)
    harness.run_until_idle()
    scheduler = harness.scheduler
    assert isinstance(scheduler, Rejecting)
    ended = {name: (reason, tokens) for name, reason, tokens in scheduler.ended}
    assert ended["a"] == ("length", 3)
    assert ended["b"] == ("rejected", 0)
    assert ended["c"][0] == "abort"
    assert len(scheduler.ended) == len(ended)
    lives = harness.ledger.lives  # what the clients get: the others go on
    assert [lives[name].finish_reason for name in "abcd"] == [ended[name][0] for name in "abcd"]


@pytest.mark.parametrize(
    ("reason", "retry_after"),
    [("", 1), ("x" * 201, 1), (None, 1), ("r", -1), ("r", float("nan")), ("r", "soon")],
)
def test_nonsense_is_a_fault_of_the_policy(reason: Any, retry_after: Any) -> None:
    harness = SchedulerHarness(Rejecting)
    harness.add_request("a", [1])
    scheduler = harness.scheduler
    assert isinstance(scheduler, Rejecting)
    step = scheduler.new_step()
    with pytest.raises(PolicyError, match=r"reject\(\) takes"):
        step.reject(next(iter(scheduler.waiting)), reason, retry_after)
    assert not scheduler.take_rejections()


async def test_its_client_is_told_why_and_when_to_ask_again_and_a_log_replays_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    settings = config(one_at_a_time(tmp_path), decision_log=str(log))
    async with AsyncEngine(settings) as engine:
        first = await engine.add_request([1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
        with pytest.raises(RequestRejectedError, match="another one is there") as caught:
            async for _ in engine.generate([1, 2], SamplingParams(max_tokens=2)):
                pass
        assert caught.value.retry_after == 7
        async with first:
            outputs = [output async for output in first]
        assert outputs[-1].finish_reason == "length"
        assert (
            b'aioserve_requests_finished_total{reason="rejected"} 1.0'
            in engine.internals.render_metrics([])
        )
    assert replay(DecisionLog(str(log))).divergence is None


def test_simulated_alone_and_in_a_fleet_the_same_are_refused(tmp_path: Path) -> None:
    requests = tuple(WorkloadRequest(0.001 * i, (Piece(i, 5),), 20) for i in range(6))
    workload = Workload("w", requests)
    settings = config(one_at_a_time(tmp_path))
    alone = [r.finish_reason for r in simulate(settings, workload).requests]
    outcome = simulate_fleet(settings, workload, Fleet(1, "least_work"))
    fleet = [r.finish_reason for r in outcome.requests]
    assert alone == fleet
    assert alone.count("refused") == 5


def test_between_steps_nothing_is_asked_until_the_time_that_the_policy_states() -> None:
    requests = (WorkloadRequest(0.0, (Piece(1, 5),), 3), WorkloadRequest(0.05, (Piece(2, 5),), 3))
    outcome = simulate(config(GATHERED, stall_timeout=0.1), Workload("w", requests))
    ttft = [request.ttft for request in outcome.requests]
    assert ttft[0] == pytest.approx(0.2, abs=0.03)  # longer than a policy may hold back silently
    assert ttft[1] == pytest.approx(0.15, abs=0.03)
    assert outcome.num_steps <= 6


def test_the_earliest_time_counts_and_a_new_step_forgets_it() -> None:
    harness = SchedulerHarness(Rejecting)
    scheduler = harness.scheduler
    assert isinstance(scheduler, Rejecting)
    scheduler.wake_at(5.0)
    scheduler.wake_at(3.0)
    scheduler.wake_at(4.0)
    assert scheduler.next_wake() == 3.0
    harness.add_request("a", [1], max_tokens=1)
    harness.run_until_idle()
    assert scheduler.next_wake() is None


@pytest.mark.parametrize("time", ["'soon'", "None", "float('nan')", "10**400"])
async def test_what_is_no_time_to_wake_at_fails_the_policy_and_not_the_engine(
    tmp_path: Path, time: str
) -> None:
    file = tmp_path / "waits.py"
    file.write_text(WAITS.replace("TIME", time))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    async with AsyncEngine(config(str(file))) as engine:
        for user in ("slow", "quick"):  # the first is served by the fallback
            pieces = [piece async for piece in engine.generate([1, 2], params, user=user)]
            assert sum(len(piece.token_ids) for piece in pieces) == 2
        assert engine.errored is None
        assert "waits.py:14" in str(engine.internals.first_policy_error)
