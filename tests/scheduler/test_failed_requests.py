"""A request that fails alone takes nobody with it that rests on blocks which it was to compute."""

import random
from typing import Any

import pytest

from aioserve.outputs import FinishReason, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import Step
from aioserve.testing import SchedulerHarness
from tests.slow import mostly_slow
from tests.testing.broken import SoundScheduler

PROMPT = [7] * 20


def test_a_request_of_the_next_step_is_computed_again_if_its_prefix_was_not_written() -> None:
    harness = SchedulerHarness(SoundScheduler, pipeline_depth=2)
    harness.add_request("fails", PROMPT, max_tokens=4)
    harness.schedule()
    harness.add_request("rests on it", [*PROMPT, 1], max_tokens=4)
    assert harness.schedule().scheduled_new_reqs[0].num_computed_tokens == len(PROMPT)
    harness.receive(failed=["fails"])
    harness.run_until_idle()
    assert harness.finished == {"fails": FinishReason.ERROR, "rests on it": FinishReason.LENGTH}
    assert harness.requests["rests on it"].num_preemptions == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_of_the_same_step_is_computed_again(depth: int) -> None:
    harness = SchedulerHarness(SoundScheduler, pipeline_depth=depth)
    for name in ("fails", "rests on it", "rests on both"):
        harness.add_request(name, [*PROMPT, *(range(9) if "rests" in name else ())], max_tokens=4)
    harness.schedule()
    harness.receive(failed=["fails"])
    harness.run_until_idle()
    assert harness.finished["rests on it"] == harness.finished["rests on both"] == "length"


def test_a_request_keeps_its_place_if_its_prefix_was_written_before() -> None:
    harness = SchedulerHarness(SoundScheduler, pipeline_depth=2)
    harness.add_request("fails", PROMPT, max_tokens=30)
    harness.step()
    harness.add_request("rests on its prompt", [*PROMPT, 1], max_tokens=4)
    harness.step()
    harness.receive(failed=["fails"])
    harness.run_until_idle()
    assert harness.requests["rests on its prompt"].num_preemptions == 0


class PreemptsInStep3(SoundScheduler):
    """All that run then lose their places, and come back in the same order."""

    def new_step(self, token_budget: int | None = None) -> Step:
        step = super().new_step(token_budget)
        if step.step_id == 3:
            for request in self.running:
                step.preempt(request)
        return step


def test_blocks_that_a_request_found_at_first_and_computed_later_are_forgotten_with_it() -> None:
    harness = SchedulerHarness(PreemptsInStep3)
    harness.add_request("before", PROMPT, max_tokens=1)
    harness.step()
    harness.add_request("fails", [*PROMPT, 1], max_tokens=4)
    harness.step()
    assert harness.requests["fails"].num_cached_tokens == len(PROMPT)
    harness.reset_prefix_cache()
    harness.step()
    harness.schedule()
    harness.receive(failed=["fails"])
    harness.add_request("after", [*PROMPT, 2], max_tokens=4)
    harness.run_until_idle()
    assert harness.requests["after"].num_cached_tokens == 0


class OrderFailsAfterAll(SoundScheduler):
    """It puts requests in line that come, and raises over those that come back."""

    def order(self, request: Request) -> float:
        return request.arrival_time / (request.status is RequestStatus.WAITING)


def test_a_dependent_that_cannot_be_put_in_line_ends_with_an_error() -> None:
    harness = SchedulerHarness(OrderFailsAfterAll, pipeline_depth=2)
    harness.add_request("fails", PROMPT, max_tokens=4)
    in_flight = harness.schedule()
    harness.add_request("rests on it", [*PROMPT, 1], max_tokens=4)
    harness.schedule()
    scheduler = harness.scheduler
    scheduler.finish_requests("fails", RequestStatus.FINISHED_ERROR)
    outputs = scheduler.update_from_output(in_flight, ModelRunnerOutput(["fails"], [[]]))
    (output,) = outputs[0].outputs
    assert (output.request_id, output.finish_reason) == ("rests on it", FinishReason.ERROR)
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize("seed", mostly_slow(range(40), but=range(12)))
def test_every_answer_is_right_whoever_fails_at_whatever_moment(seed: int) -> None:
    """Prompts share prefixes, blocks are scarce, clients leave and requests fail in any step."""
    dice = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"kv_connector": "cpu", "num_host_slots": dice.choice([4, 30])},
        {"kv_connector": "disk", "num_host_slots": dice.choice([4, 30])},
        {"num_state_slots": 9},
        {"window": 6, "num_spare_window_blocks": 30},
    ]
    harness = SchedulerHarness(
        SoundScheduler,
        pipeline_depth=dice.choice([1, 2, 2]),
        num_blocks=dice.choice([16, 24, 64]),
        max_num_batched_tokens=dice.choice([16, 64]),
        long_prefill_token_threshold=dice.choice([None, 7]),
        **dice.choice([{}, {}, *kinds]),
    )
    for number in range(40):
        prompt = [dice.randrange(2)] * dice.randrange(4, 30) + [number] * dice.randrange(3)
        harness.add_request(f"r{number}", prompt, max_tokens=dice.randrange(1, 9))
        for _ in range(dice.randrange(3)):
            if harness.num_in_flight < harness.config.depth:
                harness.plan()
        if dice.random() < 0.1:
            harness.finish(f"r{dice.randrange(number + 1)}")
        if harness.num_in_flight and dice.random() < 0.6:
            failed = [f"r{k}" for k in range(number + 1) if dice.random() < 0.15]
            harness.receive(failed=failed)
        if harness.store:
            harness.blocks_come(fails=dice.random() < 0.3)
    harness.run_until_idle()
    harness.check_repeatable()
