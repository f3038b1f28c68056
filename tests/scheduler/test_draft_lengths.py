"""A policy says how many draft tokens to guess before any is, and the runner guesses no more."""

from typing import Any

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fcfs import FCFSScheduler

from aioserve.errors import PolicyError
from aioserve.params import PoolingParams
from aioserve.scheduler import BaseScheduler, Request
from aioserve.testing.harness import SchedulerHarness


class ByUser(ChunkedPrefillScheduler):
    """As many draft tokens as the user's name says, or whatever pays."""

    def draft_length(self, request: Request) -> int | None:
        return int(request.user) if request.user else None


def longest_drafts(harness: SchedulerHarness) -> dict[str, int]:
    """By request, the most draft tokens that a step has verified."""
    found: dict[str, int] = {}
    for step in harness.steps:
        for name, drafts in step.scheduled_spec_decode_tokens.items():
            found[name] = max(found.get(name, 0), len(drafts))
    return found


def drafting(policy: type[BaseScheduler], **settings: Any) -> SchedulerHarness:
    return SchedulerHarness(policy, drafter=lambda token_ids: [1, 1, 1, 1], **settings)


def test_each_request_gets_as_many_drafts_as_the_policy_asks_for() -> None:
    harness = drafting(ByUser)
    for user in ("0", "1", "3", ""):
        harness.add_request(user or "open", [5, 6, 7], max_tokens=12, user=user)
    harness.run_until_idle()
    assert longest_drafts(harness) == {"1": 1, "3": 3, "open": 4}
    assert harness.steps[0].draft_lengths == {"0": 0, "1": 1, "3": 3}


def test_prompts_in_pieces_are_asked_about_and_embeddings_are_not() -> None:
    harness = drafting(ByUser, max_num_batched_tokens=8)
    harness.add_request("long", [5] * 20, max_tokens=3, user="2")
    harness.step()
    assert harness.steps[0].draft_lengths == {"long": 2}
    harness.run_until_idle()
    harness.add_request("pooled", [5] * 4, user="2", pooling_params=PoolingParams())
    harness.run_until_idle()
    assert not harness.steps[-1].draft_lengths


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (ByUser, {"max_draft_tokens": 0}),
        (ChunkedPrefillScheduler, {}),
    ],
)
def test_a_policy_is_asked_only_if_it_answers_and_tokens_are_guessed(
    policy: type[BaseScheduler], settings: dict[str, Any]
) -> None:
    harness = SchedulerHarness(policy, **settings)
    harness.add_request("a", [5, 6, 7], max_tokens=4, user="1")
    harness.run_until_idle()
    assert not any(step.draft_lengths for step in harness.steps)


def test_no_more_is_asked_for_than_sliding_windows_have_room_for() -> None:
    harness = drafting(ByUser, window=8)
    assert isinstance(harness.scheduler, BaseScheduler)
    assert harness.scheduler.max_draft_tokens == 2
    harness.add_request("a", [5, 6, 7], max_tokens=4, user="3")
    with pytest.raises(PolicyError, match="from 0 to 2, got 3"):
        harness.run_until_idle()


@pytest.mark.parametrize("length", [-1, 5, 2.0, True, "2", [2]])
def test_what_is_no_length_is_refused_by_name(length: Any) -> None:
    class Odd(ChunkedPrefillScheduler):
        def draft_length(self, request: Request) -> int | None:
            found: int = length
            return found

    harness = SchedulerHarness(Odd)
    harness.add_request("a", [5, 6, 7])
    with pytest.raises(
        PolicyError, match=r"policy Odd: draft_length\(\) must return None or a who"
    ):
        harness.step()


def test_a_policy_that_raises_over_a_length_fails_the_requests_of_its_step_alone() -> None:
    class Divides(ChunkedPrefillScheduler):
        def draft_length(self, request: Request) -> int | None:
            return 1 // (request.user != "bad")

    harness = SchedulerHarness(Divides, tolerates_errors=True, max_num_batched_tokens=8)
    harness.add_request("bad", [5] * 8, max_tokens=4, user="bad")
    harness.add_request("good", [6] * 8, max_tokens=4)
    harness.run_until_idle()
    assert {name: reason.value for name, reason in harness.finished.items()} == {
        "bad": "error",
        "good": "length",
    }
    (error,) = harness.errors
    assert "Divides raised ZeroDivisionError" in str(error)
    assert "in draft_length()" in str(error)


def test_the_policy_that_takes_over_is_asked_and_the_one_before_no_more() -> None:
    harness = drafting(FCFSScheduler)
    harness.add_request("a", [5, 6, 7], max_tokens=30, user="1")
    harness.step()
    assert not harness.steps[-1].draft_lengths
    harness.switch_policy(ByUser)
    harness.step()
    assert harness.steps[-1].draft_lengths == {"a": 1}
    harness.switch_policy(FCFSScheduler)
    harness.step()
    assert not harness.steps[-1].draft_lengths
    harness.run_until_idle()
