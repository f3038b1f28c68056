"""A policy may raise anywhere, at random or for ever: nobody is lost, nothing leaks or hangs.

Its requests end with an error, once; whoever is left alone goes on. The harness does what the
engine does, and checks after each call.
"""

from typing import Any

import pytest

from aioserve.errors import PolicyError
from aioserve.outputs import FinishReason
from aioserve.testing import SchedulerHarness
from aioserve.testing.state_machine import run_machine
from tests.slow import examples, mostly_slow
from tests.testing.hostile import PLACES, raising

EXAMPLES = examples(2, slow=3)  # of random traffic


@pytest.mark.parametrize("pipeline_depth", mostly_slow([1, 2], but=[2]))
@pytest.mark.parametrize("place", PLACES)
def test_random_traffic_survives_a_policy_that_raises(place: str, pipeline_depth: int) -> None:
    run_machine(
        raising(place, 0.3),
        pipeline_depth=pipeline_depth,
        max_examples=EXAMPLES,
        shrink=False,
        tolerates_errors=True,
    )


@pytest.mark.parametrize("pipeline_depth", mostly_slow([1, 2], but=[2]))
@pytest.mark.parametrize("chance", [0.3, 1.0])
@pytest.mark.parametrize("place", PLACES)
def test_under_pressure_everybody_ends_once_and_no_block_is_left(
    place: str, chance: float, pipeline_depth: int
) -> None:
    harness = SchedulerHarness(
        raising(place, chance),
        num_blocks=12,
        max_num_seqs=4,
        max_model_len=40,
        pipeline_depth=pipeline_depth,
        tolerates_errors=True,
    )
    refused = 0
    for i in range(24):
        try:
            harness.add_request(f"r{i}", [i] * (1 + 5 * i % 23), max_tokens=12)
        except PolicyError:
            refused += 1
        harness.step()
    harness.run_until_idle()
    scheduler: Any = harness.scheduler
    assert harness.errors or refused  # the policy did raise
    assert len(harness.finished) == 24 - refused
    assert set(harness.finished.values()) <= {FinishReason.LENGTH, FinishReason.ERROR}
    assert harness.kv_cache.pool.num_used_blocks == 0
    assert (scheduler.running, len(scheduler.waiting), scheduler.waiting.num_tokens) == ([], 0, 0)
