"""Policies that choose prompts by what is left to compute, by length, and in which company."""

from typing import Any

import pytest

from tests.policies.zoo.harnesses import first_served, harness_of, plans


@pytest.mark.parametrize(
    ("policy", "first"),
    [("residual_sjf", "warm"), ("prefill_only", "warm"), ("ewsjf", "cold"), ("sjf", "cold")],
)
def test_a_long_prompt_whose_prefix_is_cached_goes_before_a_shorter_one(
    policy: str, first: str
) -> None:
    """Of 36 tokens 32 are cached; the other has 20. `ewsjf` goes by length, `sjf` by arrival."""
    options = {"width": 8} if policy == "ewsjf" else {}
    harness = harness_of(policy, max_num_seqs=1, options=options)
    warm = list(range(33))
    harness.add_request("before", warm, max_tokens=2)
    harness.run_until_idle()
    harness.add_request("seat", [40] * 4, max_tokens=4)
    harness.step()
    harness.add_request("cold", [50] * 20, max_tokens=2)
    harness.add_request("warm", [*warm, 41, 42, 43], max_tokens=2)
    harness.run_until_idle()
    assert first_served(harness)[2] == first


def test_residual_sjf_counts_whole_blocks_so_that_nearly_equal_prompts_go_by_arrival() -> None:
    harness = harness_of("residual_sjf", max_num_seqs=1)
    harness.add_request("seat", [40] * 4, max_tokens=4)
    harness.step()
    for name, length in (("a", 19), ("b", 17), ("c", 8)):
        harness.add_request(name, [ord(name) % 50] * length, max_tokens=2)
    harness.run_until_idle()
    assert first_served(harness) == ["seat", "c", "a", "b"]


@pytest.mark.parametrize("policy", ["residual_sjf", "prefill_only", "ewsjf"])
def test_a_long_prompt_that_has_waited_long_goes_before_short_ones(policy: str) -> None:
    options = {"width": 8} if policy == "ewsjf" else {}
    harness = harness_of(policy, max_num_seqs=1, options=options)
    harness.add_request("seat", [40] * 4, max_tokens=8)
    harness.step()
    harness.add_request("long", [1] * 60, max_tokens=2)
    harness.add_request("short", [2] * 8, max_tokens=2)
    harness.wait(60)
    harness.add_request("late", [3] * 8, max_tokens=2)
    harness.run_until_idle()
    served = first_served(harness)
    assert served.index("long") < served.index("late")


def test_prefill_only_orders_anew_when_a_prefix_has_been_cached_meanwhile() -> None:
    """`twin` arrives last and long, and is the cheapest once its prefix was computed."""
    harness = harness_of("prefill_only", max_num_seqs=1, options={"credit": 0.0})
    shared = list(range(33))
    harness.add_request("seat", shared, max_tokens=4)
    harness.step()
    harness.add_request("other", [50] * 12, max_tokens=2)
    harness.add_request("twin", [*shared, 44], max_tokens=2)
    harness.run_until_idle()
    assert first_served(harness) == ["seat", "twin", "other"]


def test_ewsjf_lets_the_head_of_a_queue_of_short_prompts_pass_older_long_ones() -> None:
    harness = harness_of("ewsjf", max_num_seqs=1, options={"width": 8})
    harness.add_request("seat", [40] * 4, max_tokens=6)
    harness.step()
    for name, length in (("long", 50), ("longer", 60), ("short", 6)):
        harness.add_request(name, [ord(name[-1]) % 50] * length, max_tokens=2)
        harness.wait(1)
    harness.run_until_idle()
    assert first_served(harness) == ["seat", "short", "long", "longer"]


def test_small_prefills_holds_small_prompts_back_until_they_are_enough() -> None:
    harness = harness_of("small_prefills", options={"threshold": 12, "max_delay_steps": 9})
    harness.add_request("stream", [1] * 4, max_tokens=30)
    harness.step()
    for name in "abc":
        harness.add_request(name, [ord(name) % 50] * 5, max_tokens=2)
        harness.step()
    assert plans(harness)[1:] == [
        {"stream": 1},
        {"stream": 1},
        {"stream": 1, **dict.fromkeys("abc", 5)},
    ]


def test_small_prefills_holds_nothing_back_for_more_steps_than_it_may_or_beside_no_stream() -> None:
    harness = harness_of("small_prefills", options={"threshold": 12, "max_delay_steps": 3})
    harness.add_request("stream", [1] * 4, max_tokens=30)  # small, and nothing decodes: at once
    harness.step()
    harness.add_request("a", [2] * 5, max_tokens=2)
    for _ in range(4):
        harness.step()
    harness.add_request("large", [3] * 40, max_tokens=2)  # enough by itself
    harness.step()
    served = [
        next(i for i, plan in enumerate(plans(harness)) if name in plan)
        for name in ("stream", "a", "large")
    ]
    assert served == [0, 4, 5]


def test_laps_computes_short_and_long_prompts_in_steps_of_their_own() -> None:
    options = {"short": 8, "depth": 2, "chunk_size": 16}
    harness = harness_of("laps", options=options)
    harness.add_request("long", [1] * 60, max_tokens=2)
    harness.step()
    for name in "ab":
        harness.add_request(name, [ord(name) % 50] * 6, max_tokens=2)
    harness.run_until_idle()
    prompts = [{r for r, n in plan.items() if n > 1} for plan in plans(harness)]
    assert {"a", "b"} in prompts
    assert not any("long" in together and len(together) > 1 for together in prompts)
    assert first_served(harness) == ["long", "a", "b"]  # they pass the rest of the long prompt


def test_laps_waits_for_a_batch_of_short_prompts_and_not_for_longer_than_it_may() -> None:
    def first_step(depth: int) -> int:
        options = {"short": 8, "depth": depth, "max_wait": 0.05}
        harness = harness_of("laps", options=options)
        harness.add_request("stream", [1] * 20, max_tokens=30)
        harness.step()
        harness.add_request("a", [2] * 6, max_tokens=2)
        for _ in range(20):
            harness.step()
        return next(i for i, plan in enumerate(plans(harness)) if "a" in plan)

    assert first_step(depth=1) == 1
    assert 1 < first_step(depth=2) < 20


def test_laps_waits_longer_again_for_sparse_short_prompts_after_a_burst() -> None:
    options = {"short": 8, "depth": 2, "max_wait": 0.5}
    settings: dict[str, Any] = {"max_model_len": 800, "max_num_batched_tokens": 800}
    harness = harness_of("laps", options=options, step_seconds=0.05, num_blocks=400, **settings)
    harness.add_request("stream", [1] * 20, max_tokens=700)
    harness.step()

    def seconds_of(name: str) -> float:
        """Seconds for which a short prompt that comes alone is held back."""
        harness.add_request(name, [2] * 6, max_tokens=1)
        came = harness.now
        while name not in plans(harness)[-1]:
            harness.step()
        return harness.now - harness.step_seconds - came

    first = seconds_of("first")
    for i in range(10):
        for name in "ab":
            harness.add_request(f"{name}{i}", [3] * 6, max_tokens=1)
        harness.step()
    after_burst = seconds_of("after the burst")
    for i in range(20):
        later = seconds_of(f"later {i}")
    assert after_burst < 0.15 < 0.4 < later <= first


def test_laps_learns_once_of_a_batch_that_lacks_memory_for_some_steps() -> None:
    def steps_of_a_short_prompt(num_blocks: int) -> int:
        options = {"short": 8, "depth": 4, "max_wait": 10.0}
        harness = harness_of("laps", options=options, num_blocks=num_blocks, watermark=0)
        harness.add_request("large", [1] * 64, max_tokens=5)
        harness.step()
        for i in range(4):  # a batch at once
            harness.add_request(f"s{i}", [2 + i] * 6, max_tokens=1)
        harness.step()
        assert ("s0" in plans(harness)[-1]) is (num_blocks > 17)
        harness.run_until_idle()
        harness.add_request("stream", [40] * 20, max_tokens=30)
        harness.step()
        harness.add_request("alone", [9] * 6, max_tokens=1)
        came = len(harness.steps)
        while "alone" not in plans(harness)[-1]:
            harness.step()
        return len(harness.steps) - came

    assert steps_of_a_short_prompt(num_blocks=17) == steps_of_a_short_prompt(num_blocks=64) > 5


def test_batchllm_serves_prompts_that_share_a_prefix_together_and_by_their_share_of_decoding() -> (
    None
):
    harness = harness_of("batchllm", max_num_seqs=1, options={"prefix": 8})
    harness.add_request("seat", [40] * 4, max_tokens=4)
    harness.step()
    for i in range(2):
        for name, reply in (("x", 4), ("y", 4), ("talk", 64)):
            hints = {"predicted_output_tokens": reply}
            prompt = [ord(name[0]) % 50] * 8 + [i] * 4
            harness.add_request(f"{name}{i}", prompt, max_tokens=2, hints=hints)
    harness.run_until_idle()
    served = first_served(harness)[1:]
    assert served[:2] == ["talk0", "talk1"]
    assert [name[0] for name in served[2:]] in (list("xxyy"), list("yyxx"))


def test_batchllm_serves_the_batch_that_came_first_whatever_its_requests_decode() -> None:
    harness = harness_of("batchllm", max_num_seqs=1, options={"batch": 5.0})
    harness.add_request("seat", [40] * 4, max_tokens=4)
    harness.step()
    harness.add_request("old", [1] * 30, max_tokens=2, hints={"predicted_output_tokens": 1})
    harness.wait(10)
    harness.add_request("new", [2] * 4, max_tokens=2, hints={"predicted_output_tokens": 60})
    harness.run_until_idle()
    assert first_served(harness) == ["seat", "old", "new"]
