"""A failure is made simpler within a bound that no machine's speed enters, and stays the same."""

import pytest

from aioserve.scheduler import Request
from aioserve.testing import ContractViolation, SchedulerHarness
from aioserve.testing.story import Failure, shrink
from tests.testing.broken import SoundScheduler, StarvesTheShort


def fail(policy: type[SoundScheduler]) -> Failure:
    """Ten requests of several lengths and users, of which some break the policy."""
    harness = SchedulerHarness(policy, num_blocks=40, victim="newest")
    for i in range(10):
        harness.add_request(f"r{i}", [i] * (i % 4 + 1), user="ab"[i % 2], max_tokens=3)
        harness.step()
    with pytest.raises(ContractViolation) as caught:
        harness.run_until_idle()
    return Failure(harness, caught.value)


def test_only_what_breaks_the_rule_is_left() -> None:
    found = shrink(fail(StarvesTheShort)).harness
    assert found.setup == {}
    assert [(call.method, call.arguments) for call in found.calls] == [
        ("add_request", {"request_id": "r9", "prompt_token_ids": [9]}),
        ("run_until_idle", {}),
    ]


def test_no_more_steps_are_made_than_the_budget_allows() -> None:
    failure = fail(StarvesTheShort)
    assert shrink(failure, budget=0) is failure
    some = shrink(failure, budget=100)
    assert shrink(failure).size < some.size < failure.size


class TwoFaults(SoundScheduler):
    """Cannot order the priority 3, nor the user c."""

    def order(self, request: Request) -> float:
        if request.priority == 3:
            raise KeyError("three")
        if request.user == "c":
            raise ValueError("c")
        return request.arrival_time


def test_another_fault_is_not_taken_for_it() -> None:
    """Of two requests at fault the one that broke the rule is left."""
    harness = SchedulerHarness(TwoFaults)
    harness.add_request("r0", [1])
    with pytest.raises(Exception, match="ValueError") as caught:
        harness.add_request("r1", [1], priority=2, user="c")
    found = shrink(Failure(harness, caught.value))
    (call,) = found.harness.calls
    assert call.arguments == {"request_id": "r1", "prompt_token_ids": [1], "user": "c"}
    assert "ValueError" in str(found.error)
