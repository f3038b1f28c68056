"""Keys that change: `order` asked again for many at once, on a period, and the queue by groups."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from aioserve import EngineConfig
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.errors import PolicyError
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.request import Request
from aioserve.scheduler import BaseScheduler, SchedulerOutput, load_policy
from aioserve.scheduler.fallback import FallbackScheduler
from aioserve.testing import SchedulerHarness
from policies.deadline import DeadlineOrder, DeadlineScheduler
from tests.slow import mostly_slow

RECIPES = Path(__file__).parents[2] / "examples/recipes"


class ByTable(FallbackScheduler):
    """The order of a table that changes, in groups by the first letter of the request's name."""

    keys: ClassVar[dict[str, Any]] = {}

    def order(self, request: Request) -> Any:
        return self.keys[request.request_id]

    def group_by(self, request: Request) -> str:
        return request.request_id[0]


def line(scheduler: BaseScheduler) -> list[str]:
    return [request.request_id for request in scheduler.waiting]


def waiting(keys: dict[str, Any]) -> ByTable:
    """A scheduler with these requests in line, none of which has run."""
    harness = SchedulerHarness(ByTable)
    ByTable.keys = keys
    for name in keys:
        harness.add_request(name, [1, 2], max_tokens=3)
    assert isinstance(harness.scheduler, ByTable)
    return harness.scheduler


def test_all_that_wait_get_their_new_places_at_once() -> None:
    scheduler = waiting({"a": 0, "b": 1, "c": 2})
    ByTable.keys = {"a": 5, "b": 4, "c": 3}
    scheduler.reorder_all()
    assert line(scheduler) == ["c", "b", "a"]


@pytest.mark.parametrize("num_others", [0, 200])
def test_only_the_requests_that_are_given_are_asked_few_or_many(num_others: int) -> None:
    """Few are put in their places one by one, many by a sort."""
    others = {f"z{i:03}": 10 + i for i in range(num_others)}
    scheduler = waiting({"a1": 0, "b": 1, "a2": 2} | others)
    ByTable.keys = {"a1": 999, "b": -1, "a2": 1000}
    scheduler.reorder_all(scheduler.waiting.group("a"))
    assert line(scheduler) == ["b", *others, "a1", "a2"]
    assert scheduler.waiting.head("a") is scheduler.get_request("a1")


@pytest.mark.parametrize("num_others", [0, 200])
@pytest.mark.parametrize(
    ("bad", "message"),
    [({"a1": 5, "a2": "text"}, "cannot be compared"), ({"a1": 5}, "KeyError")],
)
def test_if_order_fails_for_one_no_request_has_moved(
    bad: dict[str, Any], message: str, num_others: int
) -> None:
    others = {f"z{i:03}": 10 + i for i in range(num_others)}
    scheduler = waiting({"a1": 0, "b": 1, "a2": 2} | others)
    before = line(scheduler), [r.order_key for r in scheduler.waiting]
    ByTable.keys = bad
    with pytest.raises(PolicyError, match=message):
        scheduler.reorder_all(scheduler.waiting.group("a"))
    assert (line(scheduler), [r.order_key for r in scheduler.waiting]) == before
    assert [r.request_id for r in scheduler.waiting.group("a")] == ["a1", "a2"]


def test_the_line_is_sorted_anew_as_often_as_the_policy_says_and_no_more() -> None:
    class Counting(ByTable):
        reorder_every = 3.0
        asked: ClassVar[list[float]] = []

        def order(self, request: Request) -> Any:
            self.asked.append(self.clock())
            return request.arrival_time

    harness = SchedulerHarness(Counting, max_num_seqs=1)
    for name in "ab":
        harness.add_request(name, [1, 2], max_tokens=10)
    for _ in range(10):  # a step takes a second
        harness.step()
    assert Counting.asked == [0, 0, 3, 6, 9]
    harness.run_until_idle()


def test_requests_are_kept_by_the_group_that_the_policy_names() -> None:
    scheduler = waiting({"a1": 0, "b1": 1, "a2": 2})
    assert [r.request_id for r in scheduler.waiting.heads()] == ["a1", "b1"]
    head = scheduler.waiting.head("b")
    assert head is not None
    assert head.request_id == "b1"
    assert scheduler.waiting.take_changed() == ["a", "b"]
    ByTable.keys = {"a1": 9, "b1": 1, "a2": 2}
    scheduler.reorder_all()
    assert scheduler.waiting.take_changed() == ["a"]
    assert [r.request_id for r in scheduler.waiting.group("a")] == ["a2", "a1"]
    assert scheduler.waiting.group("nobody") == []


def test_a_successor_has_the_line_by_its_own_groups() -> None:
    harness = SchedulerHarness(ByTable, max_num_seqs=1)
    ByTable.keys = {"a1": 0, "a2": 1, "b1": 2}
    for name, user in (("a1", "x"), ("a2", "y"), ("b1", "y")):
        harness.add_request(name, [1, 2], max_tokens=3, user=user)
    harness.switch_policy(load_policy("fair"))
    scheduler = harness.scheduler
    assert isinstance(scheduler, BaseScheduler)
    assert [r.request_id for r in scheduler.waiting.heads()] == ["a1", "a2"]
    harness.switch_policy(ByTable)
    scheduler = harness.scheduler
    assert isinstance(scheduler, BaseScheduler)
    assert [r.request_id for r in scheduler.waiting.heads()] == ["a1", "b1"]
    harness.run_until_idle()


def test_reading_begins_at_a_key_and_goes_on_when_the_line_changes() -> None:
    scheduler = waiting({"a": 0, "b": 1, "c": 1, "d": 2})
    assert [r.request_id for r in scheduler.waiting.from_key(1)] == ["b", "c", "d"]
    assert [r.request_id for r in scheduler.waiting.from_key(0.5)] == ["b", "c", "d"]
    assert list(scheduler.waiting.from_key(3)) == []
    seen = []
    for request in scheduler.waiting.from_key(1):
        seen.append(request.request_id)
        ByTable.keys[request.request_id] = 7
        scheduler.reorder(request)
        if len(seen) == 4:
            break
    assert seen == ["b", "c", "d", "b"]


def test_a_step_serves_no_more_requests_than_it_is_bound_to() -> None:
    class Bounded(BaseScheduler):
        def schedule(self) -> SchedulerOutput:
            step = self.new_step(max_requests=3)
            for request in step.run_decodes():
                step.run(request)
            for request in self.waiting:
                if not step.admit(request):
                    break
            return step.output()

    harness = SchedulerHarness(Bounded, max_num_seqs=8)
    for i in range(6):
        harness.add_request(f"r{i}", [i] * 5, max_tokens=2 + i)
    harness.step()
    scheduler = harness.scheduler
    assert isinstance(scheduler, BaseScheduler)
    assert scheduler.get_request_counts() == (3, 3)
    assert {reason.value for reason in scheduler.get_wait_reasons().values()} == {"budget"}
    harness.run_until_idle()
    assert max(len(step.num_scheduled_tokens) for step in harness.steps) == 3


def config(policy: str, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(policy=policy, **scheduler),
    )


@pytest.mark.parametrize("name", ["shortest_until_late", "least_served_program"])
def test_a_log_of_a_policy_whose_keys_change_replays(name: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    log = tmp_path / "log"
    requests = tuple(
        WorkloadRequest(0.05 * i, (Piece(i, rng.randint(20, 900)),), rng.randint(3, 60))
        for i in range(80)
    )
    settings = config(f"{RECIPES}/{name}.py", decision_log=str(log), max_num_seqs=2)
    simulate(settings, Workload("w", requests))
    assert replay(DecisionLog(str(log))).divergence is None


class WalksPastAll(DeadlineOrder):
    """As the order of `deadline`, and looks at every request that is late."""

    def prospects(self, now: float, late: list[Request]) -> Iterator[Request]:
        return iter(self.policy.waiting)


@pytest.mark.parametrize("seed", mostly_slow(range(4), but=[0]))
def test_deadline_decides_the_same_as_if_it_had_looked_at_all_the_late(seed: int) -> None:
    """Too little memory, so that requests are preempted half-way; most of the line is late."""
    plans = []
    for order in (DeadlineOrder, WalksPastAll):
        rng = random.Random(seed)
        harness = SchedulerHarness(
            DeadlineScheduler,
            options={"ttft": 3.0, "tpot": 0.5, "window": 3},
            num_blocks=14,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=40,
        )
        scheduler = harness.scheduler
        assert isinstance(scheduler, DeadlineScheduler)
        scheduler.deadlines = order(scheduler, scheduler.options)
        for i in range(60):
            deadline = harness.now + rng.randint(20, 90) if rng.random() < 0.2 else None
            harness.add_request(
                f"r{i}", [i] * rng.randint(1, 16), max_tokens=rng.randint(2, 20), deadline=deadline
            )
            if rng.random() < 0.3:
                harness.step()
        harness.run_until_idle()
        plans.append([(s.num_scheduled_tokens, s.preempted_req_ids) for s in harness.steps])
    assert plans[0] == plans[1]
    assert any(preempted for _, preempted in plans[0])
