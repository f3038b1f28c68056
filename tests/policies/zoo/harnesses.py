"""What tests of the zoo's policies share: a harness for one by name, and what its steps say."""

from typing import Any

from aioserve.scheduler import load_policy
from aioserve.testing import SchedulerHarness


def harness_of(name: str, **settings: Any) -> SchedulerHarness:
    """A harness for `zoo.NAME`, whose steps hold the longest prompt whole."""
    defaults = {"max_model_len": 80, "max_num_batched_tokens": 80, "num_blocks": 64}
    return SchedulerHarness(load_policy(f"zoo.{name}"), **{**defaults, **settings})


def plans(harness: SchedulerHarness) -> list[dict[str, int]]:
    """Tokens by request of each step so far."""
    return [dict(step.num_scheduled_tokens) for step in harness.steps]


def first_served(harness: SchedulerHarness) -> list[str]:
    """Requests in the order in which they were first served."""
    return list(dict.fromkeys(name for plan in plans(harness) for name in plan))


def preempted(harness: SchedulerHarness) -> list[str]:
    """Requests in the order in which they were preempted."""
    return [name for step in harness.steps for name in step.preempted_req_ids]
