"""The policy of batches: online requests as if they were alone, offline ones in what is left."""

import random

import pytest

from aioserve.apis.batches.policy import OfflineScheduler
from aioserve.scheduler import Request
from aioserve.testing import SchedulerHarness
from aioserve.testing.contract import PolicyContract
from tests.policies.simulate import Job, Served, percentile, serve
from tests.slow import mostly_slow

POLICY = "aioserve.apis.batches.policy:OfflineScheduler"
OFFLINE = {"offline": True}


class HalfOffline(OfflineScheduler):
    """Requests of the contract have no hints: by their priorities, some are offline."""

    def is_offline(self, request: Request) -> bool:
        return request.priority > 0


class TestContract(PolicyContract):
    policy = OfflineScheduler
    max_examples = 8


@pytest.mark.slow
class TestContractOfBothKinds(PolicyContract):
    policy = HalfOffline
    max_examples = 30


def chats() -> list[Job]:
    rng = random.Random(1)
    now, jobs = 0.0, []
    for number in range(100):
        now += rng.expovariate(8.0)
        jobs.append(Job(now, [number + 3] * rng.randint(20, 900), rng.randint(20, 120)))
    return jobs


def batch(num_requests: int) -> list[Job]:
    rng = random.Random(2)
    prompts = [[1000 + n] * rng.randint(50, 400) for n in range(num_requests)]
    return [Job(0.0, prompt, rng.randint(10, 100), hints=OFFLINE) for prompt in prompts]


def p99_gap(served: list[Served]) -> float:
    return percentile([gap for s in served for gap in s.gaps], 0.99)


@pytest.mark.parametrize("depth", mostly_slow([1, 2], but=[1]))
def test_a_batch_beside_chats_costs_their_gaps_less_than_a_tenth(depth: int) -> None:
    alone = serve(POLICY, chats(), pipeline_depth=depth)
    both = serve(POLICY, chats() + batch(150), pipeline_depth=depth)
    online, offline = both[: len(alone)], both[len(alone) :]
    assert p99_gap(online) < 1.1 * p99_gap(alone)
    assert all(s.finish_reason == "length" for s in offline)
    blind = serve("chunked_prefill", chats() + batch(150), pipeline_depth=depth)[: len(alone)]
    assert p99_gap(blind) > 1.1 * p99_gap(alone)


def test_a_target_lets_a_batch_fill_each_step_up_to_it() -> None:
    online = [Job(0.0, [3] * 50, 1200)]
    beside = batch(400)
    strict = serve(POLICY, online + beside)
    filled = serve(POLICY, online + beside, options={"target_itl": 0.02})
    assert p99_gap(strict[:1]) < 1.1 * p99_gap(serve(POLICY, online))
    assert p99_gap(filled[:1]) < 1.1 * 0.02
    ends = [sum(s.times[-1] < both[0].times[-1] for s in both[1:]) for both in (strict, filled)]
    assert ends[1] > 2 * ends[0]


def test_an_online_request_takes_the_seat_of_the_offline_one_that_came_last() -> None:
    harness = SchedulerHarness(OfflineScheduler, max_num_seqs=2)
    first = harness.add_request("first", [1] * 8, max_tokens=30, hints=OFFLINE)
    second = harness.add_request("second", [2] * 8, max_tokens=30, hints=OFFLINE)
    for _ in range(4):
        harness.step()
    harness.add_request("online", [3] * 8, max_tokens=4)
    harness.step()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    harness.run_until_idle()
    assert set(harness.finished) == {"first", "second", "online"}


def test_an_online_request_takes_the_blocks_of_offline_ones() -> None:
    harness = SchedulerHarness(OfflineScheduler, num_blocks=16)
    harness.add_request("offline", [1] * 40, max_tokens=10, hints=OFFLINE)
    harness.step()
    online = harness.add_request("online", [2] * 40, max_tokens=2)
    harness.step()
    assert online.num_computed_tokens > 0
    harness.run_until_idle()


def test_waiting_online_requests_go_before_older_offline_ones() -> None:
    harness = SchedulerHarness(OfflineScheduler, max_num_seqs=1)
    harness.add_request("offline", [1] * 4, max_tokens=1, hints=OFFLINE)
    harness.add_request("not offline", [2] * 4, max_tokens=1, hints={"offline": False})
    harness.add_request("online", [3] * 4, max_tokens=1)
    harness.run_until_idle()
    served = [name for step in harness.steps for name in step.num_scheduled_tokens]
    assert served == ["not offline", "online", "offline"]
