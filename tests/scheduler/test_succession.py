"""A policy that cannot take over changes nothing; those that can are the contract's to switch."""

from typing import Any

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fair import FairScheduler
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.policies.priority import PriorityScheduler

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError, InvariantError, PolicyError
from aioserve.request import EncoderInput, Request, WaitReason
from aioserve.scheduler import (
    BaseScheduler,
    SchedulerInterface,
    make_successor,
)
from aioserve.testing import SchedulerHarness


def switch(harness: SchedulerHarness, policy: type[SchedulerInterface]) -> None:
    harness.scheduler = make_successor(harness.scheduler, policy, harness.config)
    harness.check()


def test_a_single_request_that_runs_survives_the_switch_to_fair() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler)
    harness.add_request("a", [1] * 5, max_tokens=9, user="ann")
    harness.step()
    switch(harness, FairScheduler)
    harness.run_until_idle()


def test_why_requests_wait_can_be_asked_between_the_switch_and_the_next_step() -> None:
    """Keys of the old policy, a time each, and of the new one, two numbers, do not compare."""
    harness = SchedulerHarness(FCFSScheduler, num_blocks=12, max_num_seqs=1)
    for name in "abc":
        harness.add_request(name, [1] * 5, max_tokens=9)
    harness.step()
    before = harness.scheduler.get_wait_reasons()
    switch(harness, PriorityScheduler)
    assert harness.scheduler.get_wait_reasons() == before == dict.fromkeys("bc", WaitReason.SEATS)


class CannotTakeOver(PriorityScheduler):
    """Fails after all has been handed over, in an order of its own."""

    def take_over(self, other: BaseScheduler) -> None:
        super().take_over(other)
        raise ValueError("no idea")


class CannotBegin(FCFSScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise ValueError("no idea")


class CannotOrder(FCFSScheduler):
    def order(self, request: Request) -> Any:
        if request.priority == 0:
            raise ValueError("no idea")
        return -request.arrival_time


class ComparesNothing(FCFSScheduler):
    def order(self, request: Request) -> Any:
        return object()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (CannotTakeOver, r"CannotTakeOver raised ValueError\('no idea'\)"),
        (CannotBegin, r"CannotBegin raised ValueError\('no idea'\)"),
        (CannotOrder, r"CannotOrder raised ValueError\('no idea'\) in order\(\)"),
        (ComparesNothing, r"ComparesNothing: order\(\) returned .* which cannot be compared"),
    ],
)
def test_a_policy_that_fails_to_take_over_leaves_everything_as_it_was(
    policy: type[BaseScheduler], message: str
) -> None:
    harness = SchedulerHarness(FCFSScheduler, max_num_seqs=2, max_num_batched_tokens=64)
    for i in range(6):
        harness.add_request(f"r{i}", [i] * 5, max_tokens=9, priority=5 - i)
        harness.now += 1
    harness.step()
    old: Any = harness.scheduler
    keys = [request.order_key for request in old.get_requests()]
    line = list(old.waiting)
    with pytest.raises(PolicyError, match=message):
        make_successor(old, policy, harness.config)
    assert [request.order_key for request in old.get_requests()] == keys
    assert list(old.waiting) == line
    harness.run_until_idle()
    entered = [data.request_id for step in harness.steps for data in step.scheduled_new_reqs]
    assert entered == [f"r{i}" for i in range(6)]


def test_a_policy_that_could_never_run_a_request_is_refused() -> None:
    """Two images that fit a step one by one, but not both: fcfs runs whole prompts."""
    harness = SchedulerHarness(
        ChunkedPrefillScheduler, max_encoder_tokens=4, encoder_cache_tokens=4
    )
    images = [EncoderInput(0, 3, "a"), EncoderInput(5, 3, "b")]
    harness.add_request("two", [1] * 9, encoder_inputs=images, max_tokens=3)
    with pytest.raises(ConfigError, match="FCFSScheduler cannot run request 'two'"):
        make_successor(harness.scheduler, FCFSScheduler, harness.config)
    harness.run_until_idle()


def test_only_a_fresh_scheduler_on_the_same_cache_can_take_over() -> None:
    one, other = SchedulerHarness(FCFSScheduler), SchedulerHarness(FCFSScheduler)
    assert isinstance(one.scheduler, BaseScheduler)
    assert isinstance(other.scheduler, BaseScheduler)
    with pytest.raises(InvariantError, match="fresh scheduler on the same KV cache"):
        one.scheduler.take_over(other.scheduler)


class NotOurs(SchedulerInterface):
    """Implements the interface without the base."""


def test_only_policies_that_share_the_base_can_follow_each_other() -> None:
    harness = SchedulerHarness(FCFSScheduler)
    with pytest.raises(ConfigError, match="derive from BaseScheduler"):
        make_successor(harness.scheduler, NotOurs, SchedulerConfig())
