"""prefix_aged: warm prefixes are used before they are evicted, and cold requests do not starve."""

from tests.policies.simulate import Job, Served, serve

NUM_SESSIONS, NUM_TURNS = 8, 12


def interleaved_sessions() -> list[Job]:
    """Eight sessions of 600 common tokens take turns, faster than they can be served."""
    return [
        Job(0.001 * number, [3 + number % NUM_SESSIONS] * 600 + [100 + number] * 60, 8)
        for number in range(NUM_SESSIONS * NUM_TURNS)
    ]


def hit_rate(served: list[Served]) -> float:
    return sum(s.num_cached_tokens for s in served) / sum(len(s.job.prompt) for s in served)


def test_sessions_hit_the_cache_in_a_pool_that_holds_a_few_of_them() -> None:
    limits = {"num_kv_blocks": 200, "max_num_seqs": 2}
    fcfs = serve("fcfs", interleaved_sessions(), **limits)
    aged = serve("prefix_aged", interleaved_sessions(), **limits)
    # Measured: hit rate 0 -> 82% (the rest is each session's first turn and every turn's own 60
    # tokens), and all is done after 2.20 s instead of 4.80.
    assert hit_rate(fcfs) < 0.05
    assert hit_rate(aged) > 0.75
    assert last_token(aged) < 0.55 * last_token(fcfs)


def last_token(served: list[Served]) -> float:
    return max(s.times[-1] for s in served)


def cold_ttft(policy: str, **options: float) -> float:
    """Of a request with no prefix, while a warm session asks for a little more than there is."""
    warm = [Job(0.018 * i, [9] * 800 + [100 + i] * 40, 8) for i in range(300)]
    cold = Job(0.3, [3] * 400, 8)
    served, *_ = serve(policy, [cold, *warm], max_num_seqs=2, options=options)
    return served.ttft


def test_a_cold_request_waits_as_long_as_ageing_lets_it_and_without_to_the_end() -> None:
    # Measured: fcfs 0.07 s; no ageing 5.4 s, when nobody else is left; 400: 2.20 s; 1600: 0.61 s.
    assert cold_ttft("fcfs") < 0.1
    assert cold_ttft("prefix_aged", ageing=0) > 5.0
    # Its rivals' 800 cached tokens are worth 2 s, or half a second.
    assert 1.5 < cold_ttft("prefix_aged", ageing=400) < 2.5
    assert cold_ttft("prefix_aged", ageing=1600) < 0.75
