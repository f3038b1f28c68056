"""OnlineStepTime finds the price of tokens from noisy steps, and keeps it."""

import random
from collections.abc import Callable

import pytest
from aioserve.policies.fcfs import FCFSScheduler

from aioserve.errors import PolicyError
from aioserve.scheduler import BaseScheduler, CachedRequestData, OnlineStepTime, SchedulerOutput
from aioserve.testing import SchedulerHarness


def make_output(step_id: int, num_prefill: int, num_decodes: int) -> SchedulerOutput:
    """A step with one prompt from the start and decodes that read 500 tokens each."""
    tokens = {"prompt": num_prefill} if num_prefill else {}
    decodes = [f"decode-{i}" for i in range(num_decodes)]
    return SchedulerOutput(
        step_id=step_id,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[*tokens, *decodes],
            num_computed_tokens=[0] * len(tokens) + [499] * num_decodes,
            new_block_ids={},
        ),
        num_scheduled_tokens=tokens | dict.fromkeys(decodes, 1),
        total_num_scheduled_tokens=num_prefill + num_decodes,
        preempted_req_ids=[],
        finished_req_ids=[],
    )


def true_seconds(num_prefill: int, num_decodes: int) -> float:
    """A large model on a slow machine, far from the first guess."""
    context = num_prefill + 500 * num_decodes
    return 0.02 + 2e-3 * num_prefill + 1e-3 * num_decodes + 1e-6 * context


class Machine:
    """Runs steps one after another and tells the model when they are back."""

    def __init__(self) -> None:
        self.model = OnlineStepTime()
        self.random = random.Random(0)
        self.now = 0.0
        self.num_steps = 0

    def run(
        self,
        num_steps: int,
        num_prefill: Callable[[], int],
        num_decodes: Callable[[], int],
        *,
        slowdown: float = 1.0,
        accidents: float = 0.0,
    ) -> None:
        for _ in range(num_steps):
            self.num_steps += 1
            prefill, decodes = num_prefill(), num_decodes()
            output = make_output(self.num_steps, prefill, decodes)
            self.model.planned(output, self.now)
            seconds = slowdown * true_seconds(prefill, decodes) * self.random.gauss(1, 0.05)
            self.now += seconds * (50 if self.random.random() < accidents else 1)
            self.model.returned(output, self.now)

    def run_mixed(self, num_steps: int, **conditions: float) -> None:
        self.run(
            num_steps,
            lambda: self.random.randrange(512),
            lambda: self.random.randrange(64),
            **conditions,
        )

    def error(self, num_prefill: int, num_decodes: int, slowdown: float = 1.0) -> float:
        predicted = self.model.seconds(num_prefill, num_decodes, num_prefill + 500 * num_decodes)
        return predicted / (slowdown * true_seconds(num_prefill, num_decodes)) - 1


def test_a_dozen_steps_tell_the_price_of_a_prompt_token_and_a_hundred_the_rest() -> None:
    machine = Machine()
    machine.run_mixed(12)
    assert machine.model.is_fitted
    assert machine.model.seconds_per_prompt_token == pytest.approx(2e-3, rel=0.1)
    machine.run_mixed(90)
    for num_prefill, num_decodes in [(0, 8), (0, 64), (128, 8), (512, 0), (512, 64)]:
        assert abs(machine.error(num_prefill, num_decodes)) < 0.1


def test_a_budget_is_the_prompt_that_fits_the_time() -> None:
    machine = Machine()
    machine.run_mixed(100)
    budget = machine.model.max_prefill_tokens(0.5, 16, 16 * 500)
    assert machine.model.seconds(budget, 16, 16 * 500 + budget) == pytest.approx(0.5, abs=0.003)
    assert machine.model.max_prefill_tokens(0.001, 16, 16 * 500) < 0


def test_a_long_decode_does_not_wash_out_what_prompts_cost() -> None:
    machine = Machine()
    machine.run_mixed(50)
    machine.run(5000, lambda: 0, lambda: 16)
    assert abs(machine.error(512, 16)) < 0.15
    machine.run(3, lambda: 4, lambda: 16)  # a tiny prompt says little, and changes little
    assert abs(machine.error(512, 16)) < 0.25


def test_accidents_change_little_and_a_slower_machine_is_noticed() -> None:
    machine = Machine()
    machine.run_mixed(100)
    machine.run_mixed(200, accidents=0.03)  # steps that take fifty times as long
    assert abs(machine.error(256, 32)) < 0.1
    machine.run_mixed(100, slowdown=2.0)
    assert abs(machine.error(256, 32, slowdown=2.0)) < 0.15


def test_with_two_steps_in_flight_each_is_timed_from_the_end_of_the_one_before() -> None:
    model = OnlineStepTime()
    first, lost, second = (make_output(i, 100, 1) for i in (1, 2, 3))
    model.planned(first, 0.0)
    model.planned(lost, 0.0)  # discarded: it never comes back
    model.planned(second, 0.0)
    taken = []
    for output, now in ((first, 1.0), (second, 3.0), (second, 4.0)):
        model.returned(output, now)
        taken.append(model.last_seconds)
    assert taken == [1.0, 2.0, 0.0]  # the last one was never planned


def test_a_policy_that_says_so_knows_what_its_steps_took() -> None:
    class Timed(FCFSScheduler):
        uses_step_time = True

    timed = SchedulerHarness(Timed, step_seconds=0.25)
    untimed = SchedulerHarness(FCFSScheduler).scheduler
    timed.add_request("a", [1, 2, 3], max_tokens=2)
    for seconds in (0.5, 0.25):
        timed.schedule()
        timed.wait(seconds - timed.step_seconds)
        timed.receive()
    assert isinstance(timed.scheduler, BaseScheduler)
    assert isinstance(untimed, BaseScheduler)
    step_time = timed.scheduler.step_time
    assert (step_time.num_steps, step_time.last_seconds) == (2, 0.25)
    with pytest.raises(PolicyError, match=r"FCFSScheduler .* without uses_step_time = True"):
        _ = untimed.step_time
