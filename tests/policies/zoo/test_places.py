"""Policies that choose whose memory or seat another request gets, and for what."""

import pytest

from tests.policies.zoo.harnesses import first_served, harness_of, plans, preempted


@pytest.mark.parametrize(("policy", "loses"), [("cost_victim", "own"), ("sjf", "shared")])
def test_cost_victim_spares_what_shares_its_prefix_and_lifo_does_not(
    policy: str, loses: str
) -> None:
    """Two requests hold 24 tokens of the same prompt; to preempt one of them frees nearly none."""
    harness = harness_of(policy, num_blocks=15, watermark=0, max_num_seqs=3)
    prompt = list(range(24))
    harness.add_request("first", prompt, max_tokens=30)
    harness.step()
    harness.add_request("own", [50] * 20, max_tokens=30)
    harness.add_request("shared", [*prompt, 41], max_tokens=30)
    while not preempted(harness):
        harness.step()
    assert preempted(harness)[0] == loses


def test_cost_victim_spares_what_is_near_its_end() -> None:
    harness = harness_of("cost_victim", num_blocks=16, watermark=0, max_num_seqs=3)
    harness.add_request("first", [1] * 12, max_tokens=40)
    harness.step()
    harness.add_request("early", [2] * 16, max_tokens=40)
    harness.add_request("ending", [3] * 16, max_tokens=14)
    while not preempted(harness):
        harness.step()
    assert preempted(harness)[0] == "early"


def test_superinfer_gives_a_seat_to_what_has_waited_and_computes_nothing_again() -> None:
    harness = harness_of("superinfer", max_num_seqs=1, options={"slice": 0.5})
    harness.add_request("long", [1] * 4, max_tokens=60)
    harness.step()
    harness.wait(1)
    harness.add_request("new", [2] * 4, max_tokens=2)
    harness.run_until_idle()
    order = [name for plan in plans(harness) for name in plan]
    assert order.index("new") < 5
    assert sum(plan.get("long", 0) for plan in plans(harness)) == 4 + 59


def test_superinfer_lets_a_request_run_for_its_slice_before_it_rotates() -> None:
    harness = harness_of("superinfer", max_num_seqs=1, options={"slice": 1000.0})
    harness.add_request("long", [1] * 4, max_tokens=30)
    harness.step()
    harness.add_request("new", [2] * 4, max_tokens=2)
    harness.run_until_idle()
    assert first_served(harness) == ["long", "new"]
    assert "new" not in {name for plan in plans(harness)[:30] for name in plan}
