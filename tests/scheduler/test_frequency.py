"""A policy sets the card's clock where it is simulated: steps take longer, and draw less."""

from typing import Any

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve.config import EngineConfig
from aioserve.engine.builder import check_asked
from aioserve.errors import ConfigError, PolicyError
from aioserve.lab.comparison.measures import joules_of
from aioserve.lab.simulation.run import simulate, simulated
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.runner.interface import RunnerInfo
from aioserve.runner.step_times import CLOCK_SHARE, STATIC_SHARE, step_times
from aioserve.scheduler import SchedulerOutput
from aioserve.scheduler.output import StepFeatures
from aioserve.testing import SchedulerHarness


class Slow(ChunkedPrefillScheduler):
    sets_frequency = True
    keeps_decoding = False
    share: Any = 0.5

    def schedule(self) -> SchedulerOutput:
        self.set_frequency(self.share)
        return super().schedule()


def test_steps_say_the_clock_that_the_policy_set_and_nothing_at_the_highest() -> None:
    found = []
    for share in (0.5, 1):
        Slow.share = share
        harness = SchedulerHarness(Slow)
        harness.add_request("a", [1, 2, 3], max_tokens=3)
        harness.run_until_idle()
        steps = [step for step in harness.steps if step.num_scheduled_tokens]
        found.append([step.parts.get("frequency") for step in steps])
    Slow.share = 0.5
    assert found == [[{"share": 0.5}] * 3, [None] * 3]


@pytest.mark.parametrize("share", [0, 0.19, 1.01, -1, float("nan"), "half", None])
def test_a_clock_that_is_no_share_of_the_highest_is_refused(share: Any) -> None:
    harness = SchedulerHarness(Slow)
    with pytest.raises(PolicyError, match=r"a frequency is a share of the highest from 0\.2 to 1"):
        harness.scheduler.set_frequency(share)  # type: ignore[attr-defined]


def test_a_policy_that_does_not_say_so_cannot_set_it() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler)
    with pytest.raises(PolicyError, match="without sets_frequency = True"):
        harness.scheduler.set_frequency(0.5)  # type: ignore[attr-defined]


def test_an_engine_whose_runner_has_no_clock_to_set_refuses_the_policy_at_the_start() -> None:
    with pytest.raises(
        ConfigError, match="policy Slow sets the card's clock, which only a simulated card has"
    ):
        check_asked(Slow, RunnerInfo(num_kv_blocks=8))
    check_asked(Slow, RunnerInfo(num_kv_blocks=8, sets_frequency=True))
    check_asked(ChunkedPrefillScheduler, RunnerInfo(num_kv_blocks=8))


def test_what_prompts_add_goes_with_the_clock_and_a_part_of_the_rest() -> None:
    source = step_times(EngineConfig.load(overrides=[("runner.profile", "zoo-1")]).runner)
    decodes = StepFeatures(0, 8, 4000, 0)
    whole = StepFeatures(512, 8, 4512, 100_000, 1)
    assert source.seconds_at(1.0, whole, ((512, 512),)) == pytest.approx(source.seconds(whole, ()))
    fixed = source.seconds(decodes, ())
    assert source.seconds_at(0.5, decodes, ()) == pytest.approx(fixed * (1 + CLOCK_SHARE))
    assert source.seconds_at(0.5, whole, ()) > 1.5 * source.seconds(whole, ())


def test_energy_of_a_prompt_is_least_between_the_lowest_clock_and_the_highest() -> None:
    source = step_times(EngineConfig().runner)
    energy = {f: source.share_of_watts(f) / f for f in (0.2, 0.6, 1.0)}
    assert energy[0.6] < energy[1.0] < energy[0.2]
    assert source.share_of_watts(1.0) == pytest.approx(1.0)
    assert source.share_of_watts(0.2) > STATIC_SHARE


def test_a_run_at_half_the_clock_takes_longer_and_draws_less() -> None:
    requests = tuple(WorkloadRequest(i / 4, (Piece(i, 200),), 50) for i in range(8))
    workload = Workload("test", requests)
    found = {}
    for policy in ("chunked_prefill", f"{__file__}:Slow"):
        config = EngineConfig.load(overrides=[("scheduler.policy", policy)])
        outcome = simulate(simulated(config, workload.longest), workload)
        seconds = sum(outcome.steps.seconds)
        found[policy] = outcome.end, seconds - outcome.saved_seconds[0]
        joules = joules_of([(700.0, 0.0)], [seconds], [outcome.end], outcome.saved_seconds)
        assert joules == pytest.approx(700 * found[policy][1])
    (fast, full), (slow, saved) = found.values()
    assert slow > fast
    assert saved < full
