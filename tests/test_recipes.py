"""Every recipe for policies keeps the contract and does what it is for; its page shows its file."""

import re
from pathlib import Path
from typing import Any

import pytest

from aioserve.errors import EngineOverloadedError
from aioserve.outputs import FinishReason
from aioserve.request import Request
from aioserve.scheduler import BaseScheduler, load_policy
from aioserve.testing import SchedulerHarness
from aioserve.testing.contract import PolicyContract, Subject

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples/recipes").glob("*.py"))
PAGE = (ROOT / "docs/policy-recipes.md").read_text()


def policy(name: str) -> type[BaseScheduler]:
    path = ROOT / f"examples/recipes/{name}.py"
    (class_name,) = re.findall(r"^class (\w+)\(BaseScheduler\)", path.read_text(), re.MULTILINE)
    loaded = load_policy(f"{path}:{class_name}")
    assert issubclass(loaded, BaseScheduler)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES])
class TestContract(PolicyContract):
    @pytest.fixture
    def subject(self, recipe: str) -> Subject:
        return Subject(policy(recipe), max_examples=10)


def test_the_page_shows_every_recipe_as_it_is() -> None:
    shown = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert sorted(shown) == sorted(path.read_text() for path in RECIPES)


def order_of_first_tokens(harness: SchedulerHarness) -> list[str]:
    """Who was first served when, by the steps so far."""
    seen: dict[str, None] = {}
    for step in harness.steps:
        seen |= dict.fromkeys(step.num_scheduled_tokens)
    return list(seen)


def test_no_client_has_more_seats_than_it_may() -> None:
    harness = SchedulerHarness(policy("seats_per_client"), options={"seats": 2})
    for i in range(6):
        harness.add_request(f"a{i}", [i] * 4, max_tokens=8, user="a")
    harness.add_request("b", [9] * 4, max_tokens=8, user="b")
    harness.run_until_idle()
    per_step = [[name[0] for name in step.num_scheduled_tokens] for step in harness.steps]
    assert max(names.count("a") for names in per_step) == 2
    assert order_of_first_tokens(harness).index("b") == 2  # it passed those who were held


def test_a_client_in_debt_waits_while_another_has_tokens_left() -> None:
    options = {"rate": 1.0, "burst": 20.0}
    harness = SchedulerHarness(policy("token_bucket"), options=options)
    harness.add_request("heavy", [1] * 40, max_tokens=10, user="heavy")
    harness.step()
    harness.add_request("heavy again", [2] * 4, max_tokens=1, user="heavy")
    harness.add_request("light", [3] * 4, max_tokens=1, user="light")
    harness.run_until_idle()
    assert order_of_first_tokens(harness) == ["heavy", "light", "heavy again"]


def test_a_client_in_debt_is_served_when_nobody_else_waits() -> None:
    harness = SchedulerHarness(policy("token_bucket"), options={"rate": 1e-6, "burst": 1.0})
    for i in range(3):
        harness.add_request(f"r{i}", [i] * 8, max_tokens=2, user="a")
    harness.run_until_idle()
    assert set(harness.finished) == {"r0", "r1", "r2"}


def test_a_share_of_the_step_is_kept_for_the_urgent() -> None:
    limits: dict[str, Any] = {"max_num_batched_tokens": 16, "num_blocks": 64}
    harness = SchedulerHarness(policy("reserved_budget"), options={"reserved": 0.75}, **limits)
    harness.add_request("batch", [1] * 40, max_tokens=1)
    harness.step()
    harness.add_request("urgent", [2] * 12, max_tokens=1, priority=-1)
    harness.step()
    assert [step.num_scheduled_tokens for step in harness.steps] == [
        {"batch": 4},
        {"batch": 4, "urgent": 12},
    ]


def test_the_door_closes_when_the_line_is_too_long() -> None:
    """A step takes a second and holds 8 prompt tokens: 8 tokens a second."""
    harness = SchedulerHarness(
        policy("bounded_wait"), options={"max_wait": 4.0}, max_num_batched_tokens=8
    )
    for i in range(8):  # 64 tokens: nothing was measured yet, so nobody is refused
        harness.add_request(f"early{i}", [i] * 8, max_tokens=1)
    harness.step()
    harness.step()
    with pytest.raises(EngineOverloadedError, match=r"in about [67]\.\d s, later than max_wait"):
        harness.add_request("late", [9] * 8, max_tokens=1)
    harness.run_until_idle()
    harness.add_request("later", [9] * 8, max_tokens=1)
    harness.run_until_idle()
    assert "later" in harness.finished


@pytest.mark.parametrize("window", [2, 128])
def test_requests_that_would_come_too_late_are_turned_away_and_the_others_are_served(
    window: int,
) -> None:
    """One seat and steps of a second, of which the model of step times has seen enough."""
    options = {"patience": 1000.0, "window": window}
    harness = SchedulerHarness(policy("early_rejection"), options=options, max_num_seqs=1)
    for i in range(9):
        harness.add_request(f"learn{i}", [i] * 4, max_tokens=1)
    harness.run_until_idle()
    harness.add_request("at first", [1] * 4, max_tokens=12)
    due = {}
    for i in range(9):
        hints = {"slo_ttft": 6.0} if i % 3 else {}
        due[f"r{i}"] = FinishReason.REJECTED if hints else FinishReason.LENGTH
        harness.add_request(f"r{i}", [2 + i] * 4, max_tokens=1, hints=hints)
    harness.run_until_idle()
    assert {name: harness.finished[name] for name in due} == due


def test_the_earliest_deadline_goes_first_and_those_without_one_last() -> None:
    harness = SchedulerHarness(policy("earliest_deadline"), max_num_seqs=1)
    harness.add_request("none", [1] * 4, max_tokens=1)
    harness.add_request("late", [2] * 4, max_tokens=1, deadline=50.0)
    harness.add_request("soon", [3] * 4, max_tokens=1, deadline=20.0)
    harness.run_until_idle()
    assert order_of_first_tokens(harness) == ["soon", "late", "none"]


@pytest.mark.parametrize(("users", "num_cached"), [(["a"], 12), ([], 0)])
def test_a_pinned_prefix_outlives_traffic_that_would_have_evicted_it(
    users: list[str], num_cached: int
) -> None:
    harness = SchedulerHarness(
        policy("pinned_prefix"), options={"users": users, "num_tokens": 12}, num_blocks=12
    )
    harness.add_request("first", [1] * 16, max_tokens=1, user="a")
    harness.run_until_idle()
    for i in range(10):  # each takes 5 of the 12 blocks of 4
        harness.add_request(f"other{i}", [10 + i] * 16, max_tokens=4, user="b")
        harness.run_until_idle()
    again = harness.add_request("again", [1] * 16, max_tokens=1, user="a")
    harness.run_until_idle()
    assert again.num_cached_tokens == num_cached


def test_the_shortest_predicted_reply_goes_first_until_another_has_waited_long_enough() -> None:
    harness = SchedulerHarness(
        policy("shortest_predicted"), options={"usual": 20.0}, max_num_seqs=1
    )
    for name, hints in (
        ("long", {"predicted_output_tokens": 40}),
        ("unknown", {}),
        ("text", {"predicted_output_tokens": "many"}),
        ("short", {"predicted_output_tokens": 5}),
    ):
        harness.add_request(name, [1] * 4, max_tokens=50, hints=hints)
    harness.wait(10)  # as long as 100 tokens are worth
    harness.add_request("late", [1] * 4, max_tokens=50, hints={"predicted_output_tokens": 1})
    harness.run_until_idle()
    assert order_of_first_tokens(harness) == ["short", "unknown", "text", "long", "late"]


def test_a_request_behind_its_pace_gets_drafts_and_others_none_once_the_batch_is_full() -> None:
    """A step takes a second: with a token each, the hasty fall behind at once."""
    harness = SchedulerHarness(
        policy("drafts_by_pace"), options={"free": 2}, drafter=lambda token_ids: [1, 1, 1]
    )
    for name, hints in (("hasty", {"slo_tpot": 0.5}), ("calm", {"slo_tpot": 2.0})):
        harness.add_request(name, [5, 6, 7], max_tokens=30, hints=hints)
    for _ in range(4):
        harness.step()
    assert {len(step.scheduled_spec_decode_tokens) for step in harness.steps[1:]} == {2}
    harness.add_request("third", [5, 6, 7], max_tokens=30, hints={"slo_tpot": "soon"})
    harness.add_request("calm too", [5, 6, 7], max_tokens=30, hints={"slo_tpot": 2.0})
    full = len(harness.steps) + 1
    for _ in range(9):
        harness.step()
    drafted = [name for step in harness.steps[full:] for name in step.scheduled_spec_decode_tokens]
    assert set(drafted) == {"hasty", "third"}
    harness.run_until_idle()
    assert not vars(harness.scheduler)["began"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_far_ahead_of_its_reader_gives_up_its_seat_and_the_reader_never_waits(
    depth: int,
) -> None:
    """A step is a tenth of a second, and a reader takes half a second for a token."""
    options = {"reading_speed": 2.0, "buffer": 1.0}
    limits: dict[str, Any] = {"max_num_seqs": 1, "step_seconds": 0.1, "pipeline_depth": depth}
    harness = SchedulerHarness(policy("reading_speed"), options=options, **limits)
    long = harness.add_request("long", [1] * 9, max_tokens=30)
    first = harness.now
    for _ in range(8):
        harness.step()
    harness.add_request("short", [2] * 9, max_tokens=6)
    harness.step()
    while "short" not in harness.finished:
        num_read = (harness.now - first - 0.5) * 2.0
        assert long.num_output_tokens >= min(num_read, 30)
        harness.step()
    assert "long" not in harness.finished
    harness.run_until_idle()
    assert long.num_preemptions == 0


def test_a_reader_states_its_speed_and_no_request_is_paused_for_nobody() -> None:
    limits: dict[str, Any] = {"max_num_seqs": 1, "step_seconds": 0.1}
    harness = SchedulerHarness(policy("reading_speed"), **limits)
    harness.add_request("quick", [1] * 9, max_tokens=30, hints={"reading_speed": 100})
    for _ in range(8):
        harness.step()
    harness.add_request("waits", [2] * 9, max_tokens=6)
    harness.run_until_idle()
    assert order_of_first_tokens(harness) == ["quick", "waits"]
    assert not any(step.preempted_req_ids for step in harness.steps)


def test_without_hints_the_client_whose_replies_were_short_goes_first() -> None:
    harness = SchedulerHarness(policy("shortest_predicted"), max_num_seqs=1)
    for user, length in (("talker", 30), ("nodder", 2)):
        harness.add_request(f"first of {user}", [1] * 4, max_tokens=length, user=user)
    harness.run_until_idle()
    for user in ("talker", "stranger", "nodder"):
        harness.add_request(f"second of {user}", [2] * 4, max_tokens=40, user=user)
    before = len(harness.steps)
    harness.run_until_idle()
    del harness.steps[:before]
    assert order_of_first_tokens(harness) == [
        "second of nodder",
        "second of stranger",
        "second of talker",
    ]


@pytest.mark.parametrize(("says_steps", "num_found"), [(True, 5 * 12), (False, 0)])
def test_of_agents_that_take_turns_the_one_whose_turn_is_last_is_evicted(
    says_steps: bool, num_found: int
) -> None:
    """Three agents, of which two find room: by age each is evicted just before its turn."""
    harness = SchedulerHarness(policy("steps_to_next_use"), num_blocks=7)
    found = 0
    for turn in range(12):
        hints = {"program": "p", "steps_to_next_use": 2} if says_steps else {"program": "p"}
        prompt = [turn % 3] * 13
        request = harness.add_request(f"r{turn}", prompt, max_tokens=1, hints=hints)
        harness.run_until_idle()
        found += request.num_cached_tokens
    assert found == num_found


def test_prefixes_of_programs_that_are_no_longer_followed_go_first() -> None:
    harness = SchedulerHarness(policy("steps_to_next_use"), options={"programs": 1}, num_blocks=8)
    hints = {"steps_to_next_use": 3}
    for name in ("old", "new"):
        prompt = [len(name), *name.encode()] * 4
        harness.add_request(name, prompt[:13], max_tokens=1, hints={**hints, "program": name})
        harness.run_until_idle()
    harness.add_request("other", [1] * 13, max_tokens=1)
    harness.run_until_idle()
    cached = harness.kv_cache.estimate_cached_tokens
    assert [cached(harness.requests[name]) for name in ("old", "new")] == [4, 12]


@pytest.mark.parametrize(("goes_on", "num_cached"), [(True, 12), (False, 0)])
def test_a_prefix_stays_for_as_long_as_its_kind_comes_back(goes_on: bool, num_cached: int) -> None:
    harness = SchedulerHarness(policy("reuse_probability"), num_blocks=16)
    number = 0

    def serve(first: int, kind: str, session: str) -> Request:
        nonlocal number
        number += 1
        hints = {"type": kind, "session": session}
        request = harness.add_request(f"r{number}", [first] * 13, max_tokens=1, hints=hints)
        harness.run_until_idle()
        return request

    for chat in range(4):  # four conversations, of two turns each
        for turn in range(2):
            serve(chat, "chat", f"chat-{chat}" if goes_on else f"{chat}.{turn}")
            harness.wait(30)
    serve(20, "chat", "new")
    for call in range(5):
        serve(30 + call, "call", f"call-{call}")
    assert serve(20, "chat", "new").num_cached_tokens == num_cached
    harness.wait(1000)  # longer than a next turn has ever taken
    for call in range(5):
        serve(50 + call, "call", f"late-{call}")
    assert serve(20, "chat", "new").num_cached_tokens == 0


def test_in_a_full_batch_drafts_are_made_behind_tokens_that_the_model_was_sure_of() -> None:
    harness = SchedulerHarness(
        policy("confident_drafts"), options={"free": 1}, drafter=lambda token_ids: [1, 1, 1]
    )
    harness.add_request("alone", [4] * 4, max_tokens=10)
    harness.run_until_idle()
    assert not any(step.draft_lengths for step in harness.steps)
    requests = [harness.add_request(name, [5, i], max_tokens=40) for i, name in enumerate("ab")]
    seen = set()
    while not {"a", "b"} & set(harness.finished):
        unsure = {r.request_id: 0 for r in requests if r.row_values.get("entropy", 0.0) > 1.5}
        (step,) = harness.step()
        assert step.draft_lengths == unsure
        seen.add(len(unsure))
    assert seen == {0, 1, 2}


def test_a_long_served_request_gives_its_seat_to_a_newcomer_and_its_blocks_go_to_host_memory() -> (
    None
):
    options = {"quantum": 16, "reserve": 0.5}
    limits: dict[str, Any] = {"max_num_seqs": 1, "num_blocks": 16, "num_host_slots": 40}
    harness = SchedulerHarness(
        policy("swapped_levels"), options=options, kv_connector="memory", **limits
    )
    long = harness.add_request("long", [1] * 30, max_tokens=20)
    for _ in range(6):
        harness.step()
    harness.add_request("short", [2] * 9, max_tokens=12)
    harness.run_until_idle()
    assert order_of_first_tokens(harness) == ["long", "short"]
    assert list(harness.finished) == ["long", "short"]
    assert long.num_preemptions == 1
    (resumed,) = [
        data
        for step in harness.steps[1:]
        for data in step.scheduled_new_reqs
        if data.request_id == "long"
    ]
    assert resumed.num_computed_tokens == 32  # all but what is behind its last whole block


def test_the_clock_goes_down_while_steps_are_quick_and_is_the_highest_for_a_prompt_that_waits() -> (
    None
):
    harness = SchedulerHarness(
        policy("paced_clock"), max_num_seqs=1, step_seconds=0.01, options={"queue": 0.05}
    )

    def clock() -> float:
        return harness.steps[-1].parts.get("frequency", {"share": 1.0})["share"]

    harness.add_request("a", [1, 2, 3], max_tokens=40)
    for _ in range(20):
        harness.step()
    assert clock() == pytest.approx(0.4)
    harness.add_request("b", [4, 5, 6], max_tokens=2)
    for _ in range(8):
        harness.step()
    assert clock() == 1.0
