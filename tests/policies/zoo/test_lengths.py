"""Policies that go by the lengths of replies: whose turn it is, whose place is taken, what fits."""

import pytest

from aioserve.testing import SchedulerHarness
from tests.policies.zoo.harnesses import first_served, harness_of, plans, preempted


def add(harness: SchedulerHarness, name: str, predicted: object, max_tokens: int = 30) -> None:
    hints = {} if predicted is None else {"predicted_output_tokens": predicted}
    harness.add_request(name, [ord(name[0]) % 50] * 4, max_tokens=max_tokens, hints=hints)


@pytest.mark.parametrize("policy", ["sjf", "srpt", "mc_sf"])
def test_the_shortest_prediction_goes_first_and_none_or_a_text_counts_as_usual(
    policy: str,
) -> None:
    harness = harness_of(policy, max_num_seqs=1, options={"ageing": 0.0, "usual": 20.0})
    for name, predicted in (("long", 25), ("none", None), ("text", "many"), ("short", 2)):
        add(harness, name, predicted, max_tokens=2)
    harness.run_until_idle()
    assert first_served(harness) == ["short", "none", "text", "long"]


@pytest.mark.parametrize("policy", ["sjf", "srpt", "mc_sf"])
def test_waiting_is_worth_tokens_so_that_a_long_reply_has_its_turn(policy: str) -> None:
    harness = harness_of(policy, max_num_seqs=1, options={"ageing": 10.0})
    add(harness, "long", 500, max_tokens=2)
    add(harness, "short", 5, max_tokens=2)
    harness.wait(60)  # worth 600 tokens
    add(harness, "late", 5, max_tokens=2)
    harness.run_until_idle()
    assert first_served(harness) == ["short", "long", "late"]


@pytest.mark.parametrize(("age", "loses_its_place"), [(2, True), (18, False)])
def test_srpt_takes_the_place_of_a_young_request_alone(age: int, loses_its_place: bool) -> None:
    """The first is predicted to have 20 tokens: 16 of them are 0.8."""
    harness = harness_of("srpt", max_num_seqs=1, options={"ageing": 0.0})
    add(harness, "a", 20)
    for _ in range(age):
        harness.step()
    add(harness, "b", 1, max_tokens=2)
    harness.step()
    assert preempted(harness) == (["a"] if loses_its_place else [])


def test_past_future_learns_how_long_replies_are_and_admits_more_for_it() -> None:
    """Clients allow 40 tokens, and replies have 3: by the limits one fits, by history several."""

    def most_at_once(lengths: str) -> int:
        harness = harness_of(
            "peak_memory", num_blocks=16, max_num_seqs=8, options={"lengths": lengths}
        )
        for wave in range(3):
            for i in range(6):
                reply = [5, 5, 2]
                harness.add_request(
                    f"r{wave}{i}", [i] * 4, max_tokens=40, reply=reply, eos_token_ids=[2]
                )
            harness.run_until_idle()
        assert not preempted(harness)
        return max(map(len, plans(harness)))

    assert most_at_once("limit") == 1
    assert most_at_once("history") == 6


def test_by_hints_the_peak_is_that_of_the_predicted_ends() -> None:
    harness = harness_of("peak_memory", num_blocks=16, options={"lengths": "hint"})
    for name, predicted in (("a", 20), ("b", 20), ("c", 40)):
        add(harness, name, predicted, max_tokens=40)
    harness.step()
    assert plans(harness) == [{"a": 4, "b": 4}]  # 24 tokens each of 64, and 44 do not fit


def test_mc_sf_holds_a_reply_back_whose_peak_would_not_fit() -> None:
    harness = harness_of("mc_sf", num_blocks=16)
    for name, predicted in (("a", 30), ("b", 29), ("c", 31)):
        add(harness, name, predicted, max_tokens=40)
    harness.step()
    assert plans(harness) == [{"b": 4}]  # 33 and 34 tokens at their ends, of 64


@pytest.mark.parametrize(
    ("policy", "first"), [("svf", ["small", "large"]), ("sjf", ["large", "small"])]
)
def test_svf_weighs_the_memory_of_the_prompt_and_not_the_length_of_the_reply_alone(
    policy: str, first: list[str]
) -> None:
    """Volumes: 40 * 8 + 36 = 356 token-steps for the long prompt, 4 * 12 + 78 = 126."""
    harness = harness_of(policy, max_num_seqs=1, options={"ageing": 0.0})
    for name, prompt, reply in (("large", 40, 8), ("small", 4, 12)):
        hints = {"predicted_output_tokens": reply}
        harness.add_request(name, [7] * prompt, max_tokens=20, hints=hints)
    harness.run_until_idle()
    assert first_served(harness) == first


def test_a_large_volume_has_its_turn_in_svf_once_it_has_waited() -> None:
    harness = harness_of("svf", max_num_seqs=1, options={"ageing": 5.0})
    add(harness, "large", 25)
    add(harness, "small", 5)
    harness.wait(100)  # worth 500 token-steps; the large volume is 4 * 25 + 325 = 425
    add(harness, "late", 5)
    harness.run_until_idle()
    assert first_served(harness) == ["small", "large", "late"]


def test_gittins_tries_the_group_first_whose_replies_may_end_soon() -> None:
    """Replies of `coin` have 2 tokens or 60, and those of `sure` 24: by the mean (31 to 24) `sure`
    were first, and by the chance to end at little cost `coin` is.
    """

    def order(policy: str) -> list[str]:
        harness = harness_of(policy, max_num_seqs=1, options={"ageing": 0.0})
        for i in range(12):
            for user, reply in (("coin", (2, 60)[i % 2]), ("sure", 24)):
                harness.add_request(f"{user}{i}", [1] * 4, max_tokens=reply, user=user)
                harness.run_until_idle()
        harness.add_request("seat", [3] * 4, max_tokens=4, user="x")
        harness.step()
        for user in ("sure", "coin"):
            harness.add_request(user, [2] * 4, max_tokens=60, user=user)
        harness.run_until_idle()
        return [name for name in first_served(harness) if name in ("sure", "coin")]

    assert order("gittins") == ["coin", "sure"]
