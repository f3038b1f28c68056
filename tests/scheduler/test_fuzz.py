"""Random traffic over random pools, under every policy and under one that does anything."""

import random

import pytest

from aioserve.scheduler import (
    BaseScheduler,
    Request,
    SchedulerOutput,
    available_policies,
    load_policy,
)
from aioserve.testing import SchedulerHarness

ROUNDS = 60  # of random traffic per policy; a hundred rounds take about a second


class HostileScheduler(BaseScheduler):
    """Calls the verbs at random, on anybody, in any order."""

    random = random.Random(0)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.random.choice([1, 3, 17, None]))
        for _ in range(self.random.randint(1, 30)):
            anybody = [*self.running, *self.waiting]
            if not anybody:
                break
            request = self.random.choice(anybody)
            verb = self.random.random()
            if verb < 0.5:
                step.run(request, self.random.choice([None, 1, 4]))
            elif verb < 0.92:
                whole = self.random.random() < 0.2
                step.admit(request, self.random.choice([None, 2]), whole=whole)
            else:
                step.preempt(request)
        return step.output()

    def victim(self) -> Request | None:
        return self.random.choice(self.running) if self.random.random() < 0.3 else super().victim()


def run_traffic(policy: type[BaseScheduler], seed: int, depth: int) -> tuple[int, int]:
    """One round; returns preemptions and prefix hits."""
    rng = HostileScheduler.random = random.Random(seed)
    block_size, max_model_len = rng.choice([1, 2, 4]), rng.choice([8, 20, 40])
    harness = SchedulerHarness(
        policy,
        # From exactly one request's worth upwards.
        num_blocks=-(-max_model_len // block_size) + rng.choice([0, 0, 1, 3, 20]),
        block_size=block_size,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=max_model_len * rng.choice([1, 2]),
        max_model_len=max_model_len,
        pipeline_depth=depth,
        enable_prefix_caching=rng.random() < 0.8,
    )
    common = [rng.randrange(3) for _ in range(max_model_len)]
    for i in range(rng.randint(1, 25)):
        length = rng.randint(1, max_model_len - 1)
        own = [rng.randrange(50) for _ in range(length)]
        prompt = (common[: rng.randint(0, length)] + own)[:length]
        harness.add_request(
            f"r{i}",
            prompt,
            max_tokens=rng.choice([None, 1, 5]),
            priority=rng.randrange(3),
            eos_token_ids=(0,),
        )
        for _ in range(rng.choice([0, 0, 1, 3])):
            harness.step()
        if rng.random() < 0.2:
            harness.finish(f"r{rng.randint(0, i)}")
        if rng.random() < 0.02:
            harness.scheduler.reset_prefix_cache()
        if rng.random() < 0.02:
            harness.finish(None)
    harness.run_until_idle()
    stats = harness.scheduler.make_stats()
    assert stats is not None
    return stats.num_preemptions, stats.num_prefix_hit_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", [*sorted(available_policies()), "hostile"])
def test_nothing_is_lost_leaked_or_wrong_under_random_traffic(name: str, depth: int) -> None:
    policy = HostileScheduler if name == "hostile" else load_policy(name)
    totals = [run_traffic(policy, seed, depth) for seed in range(ROUNDS)]  # type: ignore[arg-type]
    assert sum(preemptions for preemptions, _ in totals) > 50  # the pools were small enough
    assert sum(hits for _, hits in totals) > 1000
