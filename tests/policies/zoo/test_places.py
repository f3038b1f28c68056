"""Policies that choose whose memory or seat another request gets, and for what."""

from math import log
from typing import Any

import pytest

from aioserve.testing import SchedulerHarness
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


def rotating(prompts: dict[str, int], **options: Any) -> SchedulerHarness:
    """Requests of as many prompt tokens, which have run for more than a slice, in 19 blocks of 4
    tokens, with room in host memory.
    """
    harness = harness_of(
        "superinfer",
        num_blocks=19,
        watermark=0,
        kv_connector="memory",
        num_host_slots=64,
        options={"slice": 0.5, **options},
    )
    for name, length in prompts.items():
        harness.add_request(name, [ord(name) % 50] * length, max_tokens=12)
    for _ in range(3):
        harness.step()
    return harness


def test_superinfer_rotates_what_ran_longest_to_host_memory_and_computes_little_again() -> None:
    harness = rotating(dict.fromkeys("abcd", 13))  # 16 tokens of KV cache each; 12 are free
    harness.add_request("new", [7] * 20, max_tokens=2)
    harness.step()
    assert preempted(harness) == ["a"]
    harness.step()
    assert plans(harness)[-1]["new"] == 20
    harness.run_until_idle()
    assert {name: len(tokens) for name, tokens in harness.tokens.items()} == {
        **dict.fromkeys("abcd", 12),
        "new": 2,
    }
    again = sum(plan.get("a", 0) for plan in plans(harness)) - (13 + 11)
    assert 0 < again < 4 * preempted(harness).count("a")  # what is behind the last whole block


@pytest.mark.parametrize(("budget", "gone"), [(100, ["a", "b"]), (13, ["a", "b"]), (12, ["a"])])
def test_superinfer_rotates_out_no_more_than_lacks_and_than_its_budget(
    budget: int, gone: list[str]
) -> None:
    """20 tokens lack, as 12 are free and 32 are wanted: each request that goes gives back 12."""
    harness = rotating(dict.fromkeys("abcd", 13), budget=budget)
    for name in "wxyz":
        harness.add_request(name, [ord(name) % 50] * 8, max_tokens=2)
    harness.step()
    assert preempted(harness) == gone


def test_superinfer_passes_over_a_request_that_has_no_whole_block_to_keep() -> None:
    harness = rotating({"s": 1, "a": 17, "b": 17, "c": 17})  # 4 + 3 * 20 tokens; 12 are free
    harness.add_request("new", [7] * 20, max_tokens=2)
    harness.step()
    assert preempted(harness) == ["a"]


def test_superinfer_without_host_memory_rotates_no_seats_while_memory_lacks() -> None:
    harness = harness_of("superinfer", num_blocks=5, max_num_seqs=1, options={"slice": 0.5})
    harness.add_request("long", [1] * 8, max_tokens=9)
    harness.step()
    harness.wait(1)
    harness.add_request("new", [2] * 16, max_tokens=2)
    harness.run_until_idle()
    assert preempted(harness) == []
    assert first_served(harness) == ["long", "new"]


@pytest.mark.parametrize(("gamma", "first"), [(0.01, "short"), (50.0, "long")])
def test_boost_is_the_shortest_first_at_a_small_gamma_and_order_of_arrival_at_a_large_one(
    gamma: float, first: str
) -> None:
    harness = harness_of("boost", max_num_seqs=1, options={"gamma": gamma})
    harness.add_request("seat", [40] * 4, max_tokens=6)
    harness.step()
    for name, length in (("long", 60), ("short", 4)):
        harness.add_request(name, [ord(name[0]) % 50] * length, max_tokens=2)
        harness.wait(1)
    harness.run_until_idle()
    assert first_served(harness)[1] == first


def test_boost_gives_the_seat_of_a_reply_that_has_doubled_to_a_short_prompt() -> None:
    def first_step(doubling: int) -> int:
        options = {"gamma": 0.01, "doubling": doubling}
        harness = harness_of("boost", max_num_seqs=1, options=options)
        harness.add_request("stream", [1] * 4, max_tokens=60)
        for _ in range(20):
            harness.step()
        harness.add_request("new", [2] * 4, max_tokens=2)
        harness.run_until_idle()
        return next(i for i, plan in enumerate(plans(harness)) if "new" in plan)

    assert first_step(doubling=8) == 20
    assert first_step(doubling=32) == 60  # its work never counts as doubled


def test_boost_fits_gamma_to_the_tail_of_latencies() -> None:
    harness = harness_of("boost")
    for i in range(100):
        harness.add_request(f"r{i}", [i % 50] * 4, max_tokens=1)
        if i >= 96:
            harness.wait(10)
        harness.run_until_idle()
    harness.add_request("last", [1] * 4, max_tokens=1)
    harness.step()
    gamma = harness.scheduler.gamma  # type: ignore[attr-defined]
    assert gamma == pytest.approx(log(5) / 10, rel=0.2)
