"""deadline: more requests in time under overload, by letting the hopeless ones go."""

import random
from typing import Any

from tests.policies.simulate import Job, Served, mean, serve

TTFT, TPOT = 1.0, 0.05  # the policy's defaults


def overload() -> list[Job]:
    """About a fifth more than the machine can do: chats, and three documents in ten requests."""
    rng = random.Random(1)
    now, jobs = 0.0, []
    for number in range(300):
        now += rng.expovariate(24.0)
        length = rng.randint(1000, 4000) if rng.random() < 0.3 else rng.randint(20, 500)
        jobs.append(Job(now, [number + 3] * length, rng.randint(20, 60)))
    return jobs


def share_in_time(served: list[Served]) -> float:
    return mean([s.ttft <= TTFT for s in served])


def share_on_pace(served: list[Served]) -> float:
    """Of requests none of whose tokens came later than TTFT and the pace allow."""
    return mean(
        [
            all(t <= s.job.arrival + TTFT + TPOT * i + 1e-9 for i, t in enumerate(s.times))
            for s in served
        ]
    )


def test_more_requests_are_in_time_under_overload_and_keep_their_pace() -> None:
    fcfs = serve("fcfs", overload())
    deadline = serve("deadline", overload())
    # Measured: TTFT kept by 26% -> 92%, every token by 4% -> 90%.
    assert share_in_time(fcfs) < 0.35
    assert share_in_time(deadline) > 0.85
    assert share_on_pace(fcfs) < 0.1
    assert share_on_pace(deadline) > 0.85


def test_relegating_the_hopeless_is_what_helps() -> None:
    options: dict[str, Any] = {"relegate": False}
    assert share_in_time(serve("deadline", overload(), options=options)) < 0.35  # measured: 23%
    # Preferring short work among those that can make it adds a little: 88% without, 92% with.
    options = {"short_first": 0}
    assert 0.8 < share_in_time(serve("deadline", overload(), options=options)) < 0.9


def test_who_is_relegated_is_served_in_the_end() -> None:
    served = serve("deadline", overload())
    assert all(len(s.times) == s.job.num_tokens for s in served)


def test_a_request_of_its_own_deadline_goes_first_or_ends_with_a_timeout() -> None:
    # 2 s of work are there before the two that want to be done within half a second.
    crowd = [Job(0.0, [3 + i] * 2000, 1) for i in range(20)]
    urgent = Job(0.01, [50] * 100, 5, timeout=0.5)
    hopeless = Job(0.01, [51] * 15000, 5, timeout=0.5)  # 0.75 s of work
    limits = {"max_num_seqs": 4}
    *_, first, second = serve("fcfs", [*crowd, urgent, hopeless], **limits)
    assert (first.finish_reason, second.finish_reason) == ("timeout", "timeout")
    *_, first, second = serve("deadline", [*crowd, urgent, hopeless], **limits)
    assert (first.finish_reason, second.finish_reason) == ("length", "timeout")
    assert first.latency < 0.5
