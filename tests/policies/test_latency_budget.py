"""latency_budget: steps take what streams allow, whatever the batch, and no less."""

import itertools
import random

import pytest

from aioserve.errors import UnknownPolicyError
from tests.policies.simulate import Job, Served, mean, percentile, serve
from tests.slow import mostly_slow


def traffic() -> list[Job]:
    """Chats of up to 120 tokens, and one long document in five."""
    rng = random.Random(1)
    now, jobs = 0.0, []
    for number in range(120):
        now += rng.expovariate(8.0)
        length = rng.randint(2000, 8000) if rng.random() < 0.2 else rng.randint(20, 300)
        jobs.append(Job(now, [number + 3] * length, rng.randint(20, 120)))
    return jobs


def p99_gap(served: list[Served]) -> float:
    return percentile([gap for s in served for gap in s.gaps], 0.99)


def worst_gap(served: list[Served]) -> float:
    return max(gap for s in served for gap in s.gaps)


@pytest.mark.parametrize(
    ("target", "depth"),
    mostly_slow(itertools.product([0.02, 0.05], [1, 2]), but=[(0.05, 2)]),
)
def test_gaps_keep_the_target_and_those_of_fcfs_are_far_above(target: float, depth: int) -> None:
    fcfs = serve("fcfs", traffic(), pipeline_depth=depth)
    served = serve(
        "latency_budget", traffic(), options={"target_itl": target}, pipeline_depth=depth
    )
    # Measured: fcfs has a worst gap of 0.52 s (0.40 at depth 2); here p99 and worst are the target.
    assert worst_gap(fcfs) > 0.35
    assert 0.9 * target < p99_gap(served) < 1.05 * target
    assert worst_gap(served) < 1.2 * target


def test_first_tokens_come_earlier_than_with_a_fixed_chunk_that_keeps_the_target() -> None:
    fixed = serve("chunked_prefill", traffic(), options={"chunk_size": 128})
    fitted = serve("latency_budget", traffic(), options={"target_itl": 0.03})
    assert p99_gap(fixed) < 0.03
    assert p99_gap(fitted) < 0.0305
    # Measured: TTFT mean 0.360 -> 0.135 s, p90 1.238 -> 0.476 s.
    for of in (mean, lambda values: percentile(values, 0.9)):
        assert of([s.ttft for s in fitted]) < 0.5 * of([s.ttft for s in fixed])


def test_a_target_that_cannot_be_met_does_not_starve_prompts() -> None:
    stream = Job(0.0, [3], 400)
    prompt = Job(0.5, [4] * 160, 1)
    *_, served = serve("latency_budget", [stream, prompt], options={"target_itl": 0.001})
    # 16 tokens in each step beside the stream, of 4.9 ms: ten steps.
    assert served.ttft < 0.06


def test_the_order_is_that_of_the_named_policy() -> None:
    jobs = [Job(0.0, [3 + i] * 2000, 1, priority=9 - i) for i in range(10)]
    limits = {"max_num_seqs": 1}
    served = serve("latency_budget", jobs, options={"order_by": "priority"}, **limits)
    ttfts = [s.ttft for s in served]
    assert ttfts == sorted(ttfts, reverse=True)
    in_turn = [s.ttft for s in serve("latency_budget", jobs, **limits)]
    assert in_turn == sorted(in_turn)


def test_an_unknown_order_is_refused_at_the_start() -> None:
    with pytest.raises(UnknownPolicyError, match="unknown policy 'fcsf'"):
        serve("latency_budget", [], options={"order_by": "fcsf"})
