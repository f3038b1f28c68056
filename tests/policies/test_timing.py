"""The policies differ where they should: the real engine on a virtual clock, exact to the tick."""

import asyncio
from itertools import pairwise

import pytest

from aioserve import AsyncEngine, SamplingParams
from tests.policies.simulate import run
from tests.slow import mostly_slow

LONG = [5] * 8192


async def token_times(
    engine: AsyncEngine,
    prompt: list[int],
    num_tokens: int,
    *,
    delay: float = 0.0,
    priority: int = 0,
) -> list[float]:
    """When each token of one request arrived, in virtual seconds."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(delay)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [
        loop.time()
        async for output in engine.generate(prompt, params, priority=priority)
        for _ in output.token_ids
    ]


def worst_gap(times: list[float]) -> float:
    return max(b - a for a, b in pairwise(times))


async def stream_beside_long_prompt(engine: AsyncEngine) -> list[float]:
    stream, _ = await asyncio.gather(
        token_times(engine, [1, 2, 3], 100), token_times(engine, LONG, 4, delay=0.1)
    )
    return stream


def test_chunked_prefill_bounds_the_worst_gap_beside_a_long_prompt_and_fcfs_does_not() -> None:
    chunked = worst_gap(run("chunked_prefill", stream_beside_long_prompt))
    whole = worst_gap(run("fcfs", stream_beside_long_prompt))
    # 512 tokens a step take 4 + 25.6 ms, plus at most half a millisecond for reading 8k context.
    assert chunked < 0.032
    assert whole > 0.4  # 8,192 tokens in one step


@pytest.mark.parametrize("chunk_size", mostly_slow([64, 256, 1024], but=[64, 1024]))
def test_smaller_chunks_give_smaller_gaps(chunk_size: int) -> None:
    gap = worst_gap(
        run("chunked_prefill", stream_beside_long_prompt, options={"chunk_size": chunk_size})
    )
    assert 50e-6 * (chunk_size - 1) < gap < 0.006 + 50e-6 * chunk_size


async def one_by_one(engine: AsyncEngine) -> list[float]:
    lengths = [3000, 10, 2000, 500, 4000, 7]
    times = await asyncio.gather(
        *(token_times(engine, [i] * length, 3, delay=0.001 * i) for i, length in enumerate(lengths))
    )
    return [t[0] for t in times]


def test_fcfs_gives_first_tokens_in_order_of_arrival() -> None:
    first_tokens = run("fcfs", one_by_one, max_num_batched_tokens=16384)
    assert first_tokens == sorted(first_tokens)


async def urgent_latecomer(engine: AsyncEngine) -> tuple[list[float], float]:
    *calm, urgent = await asyncio.gather(
        *(token_times(engine, [i] * 100, 200, priority=5) for i in range(6)),
        token_times(engine, [9] * 100, 5, delay=0.3, priority=0),
    )
    return [times[-1] for times in calm], urgent[0]


def test_priority_lets_a_late_urgent_request_overtake_and_fcfs_makes_it_wait() -> None:
    calm, urgent = run("priority", urgent_latecomer, max_num_seqs=2)
    assert urgent < 0.35  # two steps after it came, though all seats were taken
    assert urgent < min(calm)
    calm, urgent = run("fcfs", urgent_latecomer, max_num_seqs=2)
    assert urgent > max(calm[:4])  # everybody who came before was served before


def test_two_runs_give_identical_times() -> None:
    assert run("chunked_prefill", one_by_one) == run("chunked_prefill", one_by_one)
