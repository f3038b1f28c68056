"""hrrn: short prompts overtake long ones, by uncached work, and nobody waits for ever."""

import random

from tests.policies.simulate import Job, Served, mean, percentile, serve


def mixed_traffic(num_requests: int = 400, rate: float = 24.0) -> list[Job]:
    """Short questions, and one long document in seven, at about the machine's capacity."""
    rng = random.Random(1)
    now, jobs = 0.0, []
    for number in range(num_requests):
        now += rng.expovariate(rate)
        length = rng.randint(3000, 6000) if rng.random() < 0.15 else rng.randint(20, 300)
        jobs.append(Job(now, [number + 3] * length, rng.randint(5, 30)))
    return jobs


def ttfts(served: list[Served]) -> list[float]:
    return [s.ttft for s in served]


def test_first_tokens_come_much_earlier_than_in_order_of_arrival() -> None:
    fcfs = ttfts(serve("fcfs", mixed_traffic()))
    hrrn = ttfts(serve("hrrn", mixed_traffic(), options={"chunk_size": 2048}))
    # Measured: mean 0.438 -> 0.203 s (-54%), p90 1.175 -> 0.343 s (-71%), p99 1.61 -> 1.53 s.
    assert mean(hrrn) < 0.55 * mean(fcfs)
    assert percentile(hrrn, 0.9) < 0.4 * percentile(fcfs, 0.9)
    assert percentile(hrrn, 0.99) < 1.1 * percentile(fcfs, 0.99)


def test_what_is_cached_is_no_work() -> None:
    document = [7] * 4000
    jobs = [
        Job(0.0, document, 1),
        Job(2.0, [8] * 4000, 1),  # keeps the one seat while the next two arrive
        Job(2.001, [9] * 3000, 1),
        Job(2.002, document + [5] * 100, 1),
    ]
    *_, cold, warm = ttfts(serve("fcfs", jobs, max_num_seqs=1))
    assert cold < warm  # measured: 0.357 and 0.366 s
    *_, cold, warm = ttfts(serve("hrrn", jobs, max_num_seqs=1))
    assert warm < 0.65 * cold  # measured: 0.211 and 0.367 s


def test_a_long_prompt_is_served_though_short_ones_keep_coming() -> None:
    # One short prompt every 56 ms, each of 54 ms of work; alone the long one takes 0.43 s.
    short = [Job(0.056 * i, [4 + i] * 1000, 1) for i in range(200)]
    *_, long = serve("hrrn", [*short, Job(1.0, [3] * 8000, 1)], options={"chunk_size": 1024})
    assert long.ttft < 1.3  # measured: 1.00 s
