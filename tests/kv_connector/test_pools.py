"""States and windows of a toy model, which notices what was copied wrongly, or too late."""

import random
from typing import Any

import pytest

from aioserve.testing import SchedulerHarness
from tests.scheduler.test_offloading import RestlessScheduler
from tests.slow import mostly_slow

KINDS: dict[str, dict[str, Any]] = {
    "states": {"num_state_slots": [4, 6, 12]},
    "windows": {"window": [1, 3, 9, 24], "num_spare_window_blocks": [0, 6, 20]},
}
KINDS["both"] = KINDS["states"] | KINDS["windows"]


@pytest.mark.parametrize("seed", mostly_slow(range(24), but=range(6)))
@pytest.mark.parametrize("kind", KINDS)
def test_what_requests_begin_with_is_theirs_whatever_fails_around_them(
    kind: str, seed: int
) -> None:
    """Swaps at every turn, steps that fail, reads that do, clients that leave: at random."""
    rng = random.Random(seed)
    found = SchedulerHarness(
        RestlessScheduler,
        num_blocks=rng.choice([11, 14, 18]),
        block_size=4,
        max_num_seqs=rng.choice([2, 3]),
        max_model_len=44,
        num_host_slots=rng.choice([12, 120]),
        kv_connector=rng.choice(["memory", "disk"]),
        pipeline_depth=rng.choice([1, 2]),
        max_num_batched_tokens=rng.choice([80, 8]),
        **{name: rng.choice(values) for name, values in KINDS[kind].items()},
    )
    for _ in range(120):
        event, count = rng.random(), len(found.requests)
        is_open = found.num_in_flight < found.config.depth
        if event < 0.12:
            prompt = rng.choice([[], [1] * 12]) + [count % 4] * rng.randint(3, 26)
            found.add_request(f"r{count}", prompt, max_tokens=rng.choice([3, 16]))
        elif event < 0.3:
            found.blocks_come(fails=rng.random() < 0.2)
        elif event < 0.85:
            found.step()
        elif event < 0.88 and found.num_in_flight:
            found.fail_steps()
        elif event < 0.91 and is_open and found.ledger.alive:
            found.discard_step()
        elif event < 0.95 and is_open:
            found.plan()
        elif event < 0.98 and count:
            found.finish(f"r{rng.randrange(count)}")
        elif event < 0.985:
            found.reset_prefix_cache()
    found.run_until_idle(20_000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_connector", ["memory", "disk"])
def test_a_conversation_is_found_again_outside_all_pools(kind: str, kv_connector: str) -> None:
    """Its blocks, its state and its window have been given to others."""
    found = SchedulerHarness(
        RestlessScheduler,
        num_blocks=12,
        block_size=4,
        max_num_seqs=1,
        max_model_len=44,
        num_host_slots=120,
        kv_connector=kv_connector,
        pipeline_depth=1,
        **{name: values[0] for name, values in KINDS[kind].items()},
    )
    for turn in range(2):
        for i in range(4):
            found.add_request(f"r{turn}{i}", [i] * 30, max_tokens=2)
            while found.store:
                found.blocks_come()
            found.run_until_idle()
    for i in range(4):
        assert found.requests[f"r1{i}"].num_external_tokens > 0
