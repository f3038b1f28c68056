"""fair: a heavy client cannot delay a light one, and service follows weights within VTC's bound."""

import random
from typing import Any

import pytest
from aioserve.policies.fair import FairScheduler

from aioserve.testing import SchedulerHarness
from tests.policies.simulate import Job, Served, mean, serve


def test_a_light_client_does_not_wait_behind_the_backlog_of_a_heavy_one() -> None:
    heavy = [Job(0.0, [3 + i] * 500, 20, user="heavy") for i in range(120)]
    light = [Job(0.5 + 0.25 * i, [500 + i] * 100, 10, user="light") for i in range(12)]
    limits: dict[str, Any] = {"max_num_seqs": 8}
    fcfs = serve("fcfs", heavy + light, **limits)
    fair = serve("fair", heavy + light, options={"chunk_size": 512}, **limits)
    # Measured: the light one's mean TTFT 2.68 -> 0.029 s, the heavy one's 2.299 -> 2.305 s.
    assert mean([s.ttft for s in fcfs[120:]]) > 2.5
    assert max(s.ttft for s in fair[120:]) < 0.06
    assert mean([s.ttft for s in fair[:120]]) < 1.02 * mean([s.ttft for s in fcfs[:120]])


def service(served: list[Served], user: str, until: float) -> float:
    """Virtual tokens: a prompt counts when its first token comes, a token twice."""
    own = [s for s in served if s.job.user == user and s.times[0] <= until]
    return sum(len(s.job.prompt) + 2 * sum(t <= until for t in s.times) for s in own)


def backlogged(policy: str, **options: Any) -> tuple[list[float], float]:
    """Two clients of opposite shape, both with work waiting from 0.5 s on: the difference of
    their service over that time, and the ratio at its end.
    """
    long_prompts = [Job(0.0, [3 + i] * 400, 10, user="a") for i in range(100)]
    long_answers = [Job(0.5, [500 + i] * 40, 80, user="b") for i in range(200)]
    served = serve(policy, long_prompts + long_answers, max_num_seqs=8, options=options)
    last_admitted = [max(s.times[0] for s in served if s.job.user == user) for user in "ab"]
    end = min(last_admitted)
    before = {user: service(served, user, 0.5) for user in "ab"}
    gained = [
        [service(served, user, 0.5 + i * (end - 0.5) / 50) - before[user] for user in "ab"]
        for i in range(51)
    ]
    return [a - b for a, b in gained], gained[-1][0] / max(gained[-1][1], 1)


def test_service_of_backlogged_clients_differs_by_no_more_than_the_bound() -> None:
    # Twice the larger of one prompt (400) and a full batch (8 seats of 10 or 80 tokens, at 2).
    bound = 2 * max(400, 2 * 8 * 80)
    fcfs, _ = backlogged("fcfs")
    fair, ratio = backlogged("fair", chunk_size=512)
    assert max(map(abs, fcfs)) > 10 * bound  # measured: 34,900; "b" got nothing till "a" was done
    assert max(map(abs, fair)) <= bound / 2  # measured: 800 of 34,000
    assert ratio == pytest.approx(1.0, abs=0.05)


def test_service_follows_the_weights() -> None:
    _, ratio = backlogged("fair", chunk_size=512, weights={"b": 2.0})
    assert ratio == pytest.approx(0.5, abs=0.05)  # measured: 0.512


def test_a_quantum_raises_the_hit_rate() -> None:
    # Twelve clients on four common prefixes of 600 tokens, in a pool that holds three.
    jobs = [
        Job(0.0005 * i, [3 + i % 4] * 600 + [100 + i] * 40, 4, user=f"user-{i % 12}")
        for i in range(96)
    ]
    random.Random(0).shuffle(jobs)

    def hit_rate(**options: float) -> float:
        served = serve("fair", jobs, max_num_seqs=2, num_kv_blocks=120, options=options)
        return sum(s.num_cached_tokens for s in served) / sum(len(s.job.prompt) for s in served)

    assert hit_rate() < 0.1  # measured: 0
    assert hit_rate(quantum=1000) > 0.8  # measured: 0.886


def test_memory_stays_bounded_however_many_clients_come_and_go() -> None:
    harness = SchedulerHarness(FairScheduler, max_num_seqs=2)
    for i in range(1500):
        harness.add_request(f"r{i}", [i % 40, 1, 2], max_tokens=2, user=f"user-{i}")
        harness.step()
    assert len(harness.scheduler.clients.counters) < 400  # type: ignore[attr-defined]
    harness.run_until_idle()


def test_leaving_does_not_cancel_a_debt() -> None:
    harness = SchedulerHarness(FairScheduler, max_num_seqs=1)
    for i in range(40):
        harness.add_request(f"steady-{i}", [i, 1, 2, 3], max_tokens=2, user="steady")  # 6 tokens
    harness.add_request("large", list(range(50)), max_tokens=5, user="debtor")  # 58 tokens
    while "large" not in harness.finished:
        harness.step()
    harness.scheduler.clients.forget()  # type: ignore[attr-defined]
    num_before = len(harness.finished)
    harness.add_request("again", [1], max_tokens=1, user="debtor")
    while "again" not in harness.finished:
        harness.step()
    assert len(harness.finished) - num_before == 10  # 58 // 6, and itself
    harness.run_until_idle()


def test_steps_that_are_not_asked_for_are_charged_as_those_that_are() -> None:
    asked, trusted = (
        SchedulerHarness(FairScheduler, options={"output_weight": 0.1, "weights": {"b": 3.0}})
        for _ in range(2)
    )
    for harness in (asked, trusted):
        for i, user in enumerate("abb"):
            harness.add_request(f"r{i}", [3 + i] * 9, max_tokens=60, user=user)
        harness.step()
    for _ in range(7):
        asked.step()
    scheduler = trusted.scheduler
    assert isinstance(scheduler, FairScheduler)
    scheduler.decoded_on(scheduler.running, 7)
    assert isinstance(asked.scheduler, FairScheduler)
    assert scheduler.clients.counters == asked.scheduler.clients.counters  # to the last bit
    # Nobody waits any more, so that a client that returns has earned nothing by being away.
    assert scheduler.gauges() == asked.scheduler.gauges()
    assert scheduler.gauges()["clients_waiting"] == 0
