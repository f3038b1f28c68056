"""Policies that keep service levels: what is deferred or drafted, and how fast the card runs."""

from typing import Any

import pytest

from aioserve.scheduler import load_policy
from aioserve.testing import SchedulerHarness
from tests.policies.zoo.harnesses import first_served, harness_of, plans, preempted


def test_qoserve_relegates_an_unimportant_request_so_that_an_important_one_is_in_time() -> None:
    harness = harness_of("qoserve", max_num_seqs=1, options={"ttft": 6.0})
    harness.add_request("seat", [9] * 4, max_tokens=4)
    harness.step()
    harness.add_request("low", [1] * 60, max_tokens=2, priority=5, hints={"slo_ttft": 0.01})
    harness.add_request("high", [2] * 4, max_tokens=2)
    harness.run_until_idle()
    assert first_served(harness) == ["seat", "high", "low"]


def test_qoserve_serves_offline_work_by_its_end_and_so_after_what_is_interactive() -> None:
    harness = harness_of("qoserve", max_num_seqs=1)
    harness.add_request("seat", [9] * 4, max_tokens=4)
    harness.step()
    harness.add_request("batch", [1] * 4, max_tokens=2, hints={"offline": True})
    harness.step()
    harness.add_request("chat", [2] * 4, max_tokens=2, hints={"slo_ttft": 60})
    harness.run_until_idle()
    assert first_served(harness) == ["seat", "chat", "batch"]


def test_jitserve_holds_a_stream_back_that_is_ahead_while_a_prompt_needs_the_step() -> None:
    options = {"tpot": 30.0, "min_prefill_tokens": 8}
    harness = harness_of("jitserve", options=options, step_seconds=0.001)
    harness.add_request("stream", [1] * 4, max_tokens=30)
    harness.step()
    harness.step()
    harness.add_request("prompt", [2] * 40, max_tokens=2)
    harness.step()
    assert plans(harness) == [{"stream": 4}, {"stream": 1}, {"prompt": 40}]
    harness.run_until_idle()
    assert len(harness.tokens["stream"]) == 30


def test_slos_serve_declines_the_longest_prompt_so_that_the_others_are_in_time() -> None:
    harness = harness_of(
        "slos_serve", max_num_seqs=1, options={"ttft": 9.0, "min_prefill_tokens": 4}
    )
    harness.add_request("seat", [9] * 4, max_tokens=3)
    harness.step()
    harness.add_request("long", [1] * 70, max_tokens=2, hints={"slo_ttft": 0.05})
    for i in range(2):
        harness.add_request(f"s{i}", [2 + i] * 4, max_tokens=2)
    harness.run_until_idle()
    assert first_served(harness) == ["seat", "s0", "s1", "long"]


def test_slos_serve_lets_a_loose_stream_skip_batches_while_prompts_wait() -> None:
    harness = harness_of("slos_serve", options={"min_prefill_tokens": 8})
    harness.add_request("loose", [1] * 4, max_tokens=9, hints={"slo_tpot": 50, "slo_ttft": 200})
    harness.add_request("tight", [2] * 4, max_tokens=9, hints={"slo_tpot": 0.01})
    harness.step()
    harness.add_request("prompt", [3] * 60, max_tokens=2)
    harness.step()
    assert "loose" not in plans(harness)[-1]
    assert "tight" in plans(harness)[-1]
    harness.run_until_idle()


def test_andes_gives_the_place_of_a_stream_whose_reader_is_behind_to_a_request_that_waits() -> None:
    options = {"speed": 0.1, "ttft": 1.0, "horizon": 5.0}  # a token is read in ten seconds
    harness = harness_of("andes", max_num_seqs=1, options=options)
    harness.add_request("ahead", [1] * 4, max_tokens=30)
    for _ in range(6):
        harness.step()
    harness.add_request("waits", [2] * 4, max_tokens=2)
    harness.run_until_idle()
    paused = [name for step in harness.steps for name in step.paused_req_ids]
    assert paused == ["ahead"]
    planned = [plan.get("ahead", 0) for plan in plans(harness)]
    assert sum(planned) == 4 + 29  # the prompt, and tokens but the last: nothing is computed again
    fast = harness_of("andes", max_num_seqs=1, options={**options, "speed": 1.0})
    fast.add_request("read at once", [1] * 4, max_tokens=30)
    for _ in range(6):
        fast.step()
    fast.add_request("waits", [2] * 4, max_tokens=2)
    fast.run_until_idle()
    assert preempted(fast) == []


def test_hygen_takes_the_place_of_offline_work_for_an_online_request() -> None:
    harness = harness_of("hygen", max_num_seqs=1)
    harness.add_request("batch", [1] * 4, max_tokens=30, hints={"offline": True})
    harness.step()
    harness.step()
    harness.add_request("chat", [2] * 4, max_tokens=3)
    harness.step()
    assert plans(harness)[-1] == {"chat": 4}
    assert preempted(harness) == ["batch"]
    harness.run_until_idle()
    assert len(harness.tokens["batch"]) == 30


def test_hygen_serves_offline_prompts_with_one_prefix_one_after_the_other() -> None:
    harness = harness_of("hygen", max_num_seqs=1)
    harness.add_request("seat", [9] * 4, max_tokens=4)
    harness.step()
    for i in range(6):
        first = 1 + i % 2
        prompt = [first] * 8 + [i]
        harness.add_request(f"{'ab'[i % 2]}{i}", prompt, max_tokens=2, hints={"offline": True})
    harness.run_until_idle()
    assert "".join(name[0] for name in first_served(harness)[1:]) == "aaabbb"


def clocks(harness: SchedulerHarness) -> list[float]:
    """Share of the highest clock at which each step so far that served a request ran."""
    steps = [step for step in harness.steps if step.num_scheduled_tokens]
    return [step.parts.get("frequency", {"share": 1.0})["share"] for step in steps]


def test_greenllm_lowers_the_clock_of_decodes_while_steps_are_quick() -> None:
    def share(step_seconds: float) -> float:
        harness = harness_of("greenllm", step_seconds=step_seconds)
        harness.add_request("a", [1] * 4, max_tokens=60)
        for _ in range(40):
            harness.step()
        return clocks(harness)[-1]

    assert share(step_seconds=0.01) == pytest.approx(0.4)
    assert share(step_seconds=0.035) == 1.0  # between both bounds it stays where it is
    assert share(step_seconds=0.05) == 1.0


def test_greenllm_computes_prompts_at_a_clock_that_is_as_high_as_their_wait_is_long() -> None:
    harness = harness_of("greenllm", step_seconds=0.01, max_num_seqs=1, options={"ttft": 0.2})
    harness.add_request("stream", [1] * 4, max_tokens=60)
    for _ in range(20):
        harness.step()
    assert clocks(harness)[-1] == pytest.approx(0.4)
    harness.add_request("new", [2] * 4, max_tokens=2)
    harness.step()
    assert clocks(harness)[-1] == pytest.approx(0.6)
    for _ in range(25):
        harness.step()
    assert clocks(harness)[-1] == 1.0


def test_greenllm_learns_nothing_of_decodes_from_steps_without_any() -> None:
    harness = harness_of("greenllm", step_seconds=0.01, options={"chunk_size": 8})
    harness.add_request("prompt", [1] * 64, max_tokens=4)
    for _ in range(10):
        harness.step()
    assert [share for share in clocks(harness) if share < 1] == pytest.approx([0.95])


def test_greenllm_learns_once_from_a_step_whatever_is_planned_before_the_next_one() -> None:
    harness = harness_of("greenllm", step_seconds=0.01)
    harness.add_request("stream", [1] * 4, max_tokens=60)
    for _ in range(3):
        harness.step()
    before = clocks(harness)[-1]
    for _ in range(4):
        harness.plan()
    assert before - clocks(harness)[-1] == pytest.approx(0.05)


def drafting(**options: Any) -> SchedulerHarness:
    policy = load_policy("zoo.adaserve")
    return SchedulerHarness(policy, drafter=lambda token_ids: [1, 1, 1, 1], options=options)


def test_adaserve_drafts_first_for_the_stream_that_is_behind_its_pace() -> None:
    harness = drafting(verify=4)
    for name, pace in (("calm", 100.0), ("late", 0.001)):
        harness.add_request(name, [1, 2, 3], max_tokens=20, hints={"slo_tpot": pace})
    for _ in range(4):
        harness.step()
    assert harness.steps[-1].draft_lengths == {"calm": 0, "late": 4}


def test_adaserve_takes_over_streams_as_if_they_had_kept_their_pace() -> None:
    harness = SchedulerHarness(
        load_policy("chunked_prefill"), drafter=lambda token_ids: [1, 1, 1, 1], step_seconds=1.0
    )
    for name, pace in (("calm", 100.0), ("late", 0.5)):
        harness.add_request(name, [1, 2, 3], max_tokens=40, hints={"slo_tpot": pace})
    for _ in range(6):
        harness.step()
    harness.switch_policy(load_policy("zoo.adaserve"), {"verify": 4})
    for _ in range(2):
        harness.step()
    assert harness.steps[-1].draft_lengths == {"calm": 0, "late": 4}


def test_adaserve_gives_what_is_left_to_the_drafts_that_are_accepted() -> None:
    harness = drafting(verify=4, tpot=1000.0)
    harness.add_request("right", [1, 2, 3], max_tokens=40, reply=[[1] * 40])
    harness.add_request("wrong", [4, 5, 6], max_tokens=40, reply=[7] * 40)
    for _ in range(6):
        harness.step()
    lengths = harness.steps[-1].draft_lengths
    assert lengths["right"] > lengths["wrong"]
    assert sum(lengths.values()) == 4
    harness.run_until_idle()
