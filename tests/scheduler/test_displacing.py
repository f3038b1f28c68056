"""`admit(request, displacing=...)`: what a request needs is taken from others, or nothing is."""

import copy
import random
from itertools import product
from typing import Any

import pytest

from aioserve.request import EncoderInput, Request, RequestStatus, WaitReason
from aioserve.scheduler import BaseScheduler, SchedulerOutput, Step
from aioserve.testing import SchedulerHarness
from tests.slow import mostly_slow

NUM_STEPS = 16


def admits_after(step: Step, request: Request, victims: list[Request]) -> bool:
    """Whether the request is admitted once these are preempted, tried on a copy of everything."""
    trial, wanted, leaving = copy.deepcopy((step, request, victims))
    for victim in leaving:
        trial.preempt(victim)
    return trial.admit(wanted) > 0


def dependents(step: Step) -> list[Request]:
    """Requests that lose their places with another one."""
    return [r for requests in step._dependents.values() for r in requests]


class Displaces(BaseScheduler):
    """Admits at random in the places of others, and checks each time what it would have taken."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rng = random.Random(7)
        self.seen: dict[str, int] = {"displaced": 0, "in vain": 0}

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in list(self.waiting):
            if step.admit(request) or request.wait_reason is None:
                continue
            displacing = self.rng.sample(self.running, self.rng.randrange(len(self.running) + 1))
            self.check(step, request, request.wait_reason, displacing)
        return step.output()

    def check(
        self, step: Step, request: Request, reason: WaitReason, displacing: list[Request]
    ) -> None:
        by_hand = [displacing[: i + 1] for i in range(len(displacing))]
        of_step = (WaitReason.BUDGET, WaitReason.ENCODER_BUDGET)
        can = reason not in of_step and any(admits_after(step, request, v) for v in by_hand)
        before, untouched = list(self.running), copy.deepcopy((step, request, displacing))
        granted = step.admit(request, displacing=iter(displacing))
        gone = [r for r in before if r.status is not RequestStatus.RUNNING]
        assert bool(gone) == (granted > 0) == can, (reason, granted, gone)
        self.seen["in vain"] += bool(displacing) and not can
        if not granted:
            assert self.running == before
            return
        self.seen["displaced"] += 1
        chosen = [i for i, victim in enumerate(displacing) if victim in gone]
        if len(chosen) == len(gone) and not dependents(untouched[0]):
            for spared in chosen:  # no request lost its place in vain
                fewer = [untouched[2][i] for i in chosen if i != spared]
                assert not admits_after(untouched[0], untouched[1], fewer), (reason, gone)


SHORT: dict[str, dict[str, Any]] = {
    "seats": {"max_num_seqs": 3, "num_blocks": 60},
    "blocks": {"num_blocks": 22},
    "blocks_at_once": {"num_blocks": 22, "max_num_batched_tokens": 200},
    "adapters": {"max_loras": 2, "num_blocks": 40},
    "states": {"num_state_slots": 3, "num_blocks": 30},
    "windows": {"window": 12, "num_spare_window_blocks": 10, "num_blocks": 40},
    "pieces": {"long_prefill_token_threshold": 5, "num_blocks": 24, "max_num_seqs": 5},
}


@pytest.mark.parametrize(
    ("pipeline_depth", "short"),
    mostly_slow(
        product([1, 2], SHORT), but=[(1, "blocks"), (2, "adapters"), (2, "windows"), (2, "pieces")]
    ),
)
def test_a_request_takes_just_what_it_needs_or_nothing(short: str, pipeline_depth: int) -> None:
    harness = SchedulerHarness(Displaces, pipeline_depth=pipeline_depth, **SHORT[short])
    rng = random.Random(3)
    for i in range(NUM_STEPS):
        for name in "ab"[: rng.randrange(3)]:
            prompt = [rng.randrange(3)] * rng.randrange(0, 17) + [i] * rng.randrange(1, 30)
            images = [EncoderInput(0, 3, f"image-{i % 4}")] if i % 5 == 0 and i % 2 else []
            harness.add_request(
                f"{name}{i}",
                prompt if not images else [9] * 3 + prompt,
                max_tokens=rng.randrange(2, 14),
                adapter_id=rng.choice(["", "x", "y", "z"]) if short == "adapters" else "",
                encoder_inputs=tuple(images) if short not in ("states", "windows") else (),
            )
        harness.step()
    policy: Any = harness.scheduler
    assert policy.seen["displaced"]
    assert policy.seen["in vain"] or short not in ("blocks", "adapters", "states", "windows")


class TakesEverything(BaseScheduler):
    """Admits in the places of all that run."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(5)
        step.run_decodes()
        for request in list(self.waiting):
            step.admit(request, displacing=self.running)
        return step.output()


def test_nothing_is_taken_for_what_no_request_holds() -> None:
    """Tokens and encoder outputs of a step are not given back by those who leave it."""
    harness = SchedulerHarness(TakesEverything, max_num_batched_tokens=5)
    early = [harness.add_request(f"r{i}", [i], max_tokens=6) for i in range(5)]
    harness.step()
    late = harness.add_request("late", [9] * 4, max_tokens=1)
    harness.step()
    assert late.wait_reason is WaitReason.BUDGET
    harness.run_until_idle()
    assert sum(request.num_preemptions for request in early) == 0
