"""The contract of every policy, and what this one is for."""

from aioserve_shortest_first.policy import ShortestFirstScheduler

from aioserve.testing import SchedulerHarness
from aioserve.testing.contract import PolicyContract


class TestContract(PolicyContract):
    policy = ShortestFirstScheduler


def order_of_first_tokens(long_waits_for: float) -> list[str]:
    """One seat; a long prompt comes `long_waits_for` seconds before two short ones."""
    harness = SchedulerHarness(
        ShortestFirstScheduler, max_num_seqs=1, options={"tokens_per_second": 10.0}
    )
    harness.add_request("first", [1], max_tokens=30)
    harness.step()
    harness.add_request("long", [2] * 40, max_tokens=5)
    harness.wait(long_waits_for)
    harness.add_request("short", [3] * 5, max_tokens=5)
    harness.add_request("shorter", [4] * 4, max_tokens=5)
    harness.run_until_idle()
    return [data.request_id for step in harness.steps for data in step.scheduled_new_reqs]


def test_short_prompts_overtake_long_ones() -> None:
    assert order_of_first_tokens(0.0) == ["first", "shorter", "short", "long"]


def test_a_long_prompt_that_has_waited_long_is_not_overtaken() -> None:
    assert order_of_first_tokens(5.0) == ["first", "long", "shorter", "short"]
