"""mlfq: short answers come back soon, with nobody guessing lengths, and long ones end."""

import asyncio
import random
from typing import Any

import pytest
from aioserve.policies.mlfq import MLFQScheduler

from aioserve import AsyncEngine
from aioserve.testing import SchedulerHarness
from tests.kit import stats_of
from tests.policies.simulate import Job, Served, mean, run, serve, serve_one


def mixed_answers() -> list[Job]:
    """Equal prompts; four answers in five are short. More than four seats can do for half a
    minute.
    """
    rng = random.Random(1)
    now, jobs = 0.0, []
    for number in range(300):
        now += rng.expovariate(10.0)
        is_long = rng.random() < 0.2
        num_tokens = rng.randint(300, 500) if is_long else rng.randint(5, 30)
        jobs.append(Job(now, [number + 3] * rng.randint(20, 200), num_tokens))
    return jobs


def latencies(served: list[Served], *, long: bool) -> list[float]:
    return [s.latency for s in served if (s.job.num_tokens > 30) == long]


def test_short_answers_come_back_much_sooner_and_long_ones_end() -> None:
    limits: dict[str, Any] = {"max_num_seqs": 4}
    fcfs, mlfq = (serve(policy, mixed_answers(), **limits) for policy in ("fcfs", "mlfq"))
    # Measured: mean of short ones 1.88 -> 0.18 s, of all 2.18 -> 1.06 s; the last long one 11.8 s.
    assert mean(latencies(mlfq, long=False)) < 0.15 * mean(latencies(fcfs, long=False))
    assert mean([s.latency for s in mlfq]) < 0.6 * mean([s.latency for s in fcfs])
    assert all(len(s.times) == s.job.num_tokens for s in mlfq)
    assert max(latencies(mlfq, long=True)) < 3 * max(latencies(fcfs, long=True))


def test_a_long_prompt_skips_the_upper_levels_and_a_short_one_sinks() -> None:
    scheduler = SchedulerHarness(MLFQScheduler, max_model_len=64, options={"quantum": 16})
    short = scheduler.add_request("short", [1] * 10, max_tokens=20)
    long = scheduler.add_request("long", [2] * 40, max_tokens=1)
    policy: Any = scheduler.scheduler
    assert (policy.level(short), policy.level(long)) == (0, 2)
    scheduler.run_until_idle()
    assert policy.level(short) == 4  # 10 + 8 * 20 = 170 tokens of service: 16 * 8 < 170 < 16 * 16


def test_a_request_is_thrown_out_for_others_only_so_often_and_lifted_by_waiting() -> None:
    # One seat, and short requests that would fill it for ever.
    short = [Job(0.045 * i, [4 + i] * 20, 10) for i in range(200)]
    long = Job(0.0, [3] * 100, 200)

    def latency(**options: float) -> float:
        return serve("mlfq", [long, *short], max_num_seqs=1, options=options)[0].latency

    last_arrival = short[-1].arrival
    assert latency(max_preemptions=10**6) > last_arrival  # not before the others stop coming
    # Measured: 3.9 s, and 2.5 s if waiting helps sooner; alone it takes 0.9 s.
    assert latency() < 5.0 < last_arrival
    assert latency(starve_after=2.0) < 3.0


def preempted(num_outputs: int, **limits: int) -> int:
    """How often a request that had this many tokens gives its place to a short one at once."""
    harness = SchedulerHarness(MLFQScheduler, options={"quantum": 8}, **limits)
    lower = harness.add_request("lower", [1] * 40, max_tokens=20)
    for _ in range(num_outputs):
        harness.step()
    harness.add_request("upper", [2] * 5, max_tokens=2)
    harness.step()
    found = lower.num_preemptions
    harness.run_until_idle()
    return found


def test_what_would_be_computed_again_is_displaced_only_if_that_pays() -> None:
    plenty, short = {"max_num_seqs": 1}, {"num_blocks": 15, "max_num_seqs": 1}
    assert preempted(2, **plenty) == 1  # its blocks stay
    assert preempted(2, **short) == 0  # 42 tokens again, for 2 * 8 that are put off
    assert preempted(10, **short) == 1  # 50 tokens again, for 10 * 8


@pytest.mark.slow
def test_short_of_memory_little_is_computed_twice() -> None:
    """Six seconds of a chat, whose outputs are of one size, with memory for a part of the seats."""
    rng = random.Random(2)
    jobs = [
        Job(0.04 * i, [i + 3] * rng.randint(200, 1500), rng.randint(50, 350)) for i in range(150)
    ]
    limits: dict[str, Any] = {"max_num_seqs": 24, "num_kv_blocks": 1200}

    async def serve_all(engine: AsyncEngine) -> tuple[float, int]:
        served = await asyncio.gather(*(serve_one(engine, job) for job in jobs))
        return mean([s.latency for s in served]), stats_of(engine).num_preemptions

    (fcfs, _), (mlfq, num_preemptions) = (
        run(policy, serve_all, **limits) for policy in ("fcfs", "mlfq")
    )
    # Measured: 7.0 and 6.3 s, the last after 17.5 and 17.8 s; 8 preemptions under `mlfq`.
    assert num_preemptions
    assert mlfq < 1.1 * fcfs
