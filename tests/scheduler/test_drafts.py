"""How many guesses are verified is the policy's to say."""

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve.scheduler import SchedulerOutput
from aioserve.testing.harness import SchedulerHarness


@pytest.mark.parametrize("num_drafts", [0, 2, 5])
def test_a_policy_grants_as_many_drafts_as_it_says(num_drafts: int) -> None:
    class Frugal(ChunkedPrefillScheduler):
        def schedule(self) -> SchedulerOutput:
            step = self.new_step()
            for request in list(self.running):
                step.run(request, max_tokens=1 + num_drafts)
            for request in self.waiting:
                step.admit(request)
            return step.output()

    harness = SchedulerHarness(Frugal, drafter=lambda token_ids: [1, 1, 1])
    for name in ("a", "b"):
        harness.add_request(name, [5, 6, 7], max_tokens=12)
    harness.run_until_idle()
    sent = [len(d) for step in harness.steps for d in step.scheduled_spec_decode_tokens.values()]
    assert max(sent, default=0) == min(num_drafts, 3)
    assert len(sent) >= 4 or not num_drafts


def test_at_depth_2_drafts_follow_the_token_of_the_step_in_flight() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, pipeline_depth=2)
    request = harness.add_request("a", [5, 6, 7], max_tokens=9, reply=[1, 2, [3, 4, 5, 6, 7], 8, 9])
    harness.run_until_idle()
    assert request.token_ids[3:] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    sent = [step.scheduled_spec_decode_tokens for step in harness.steps]
    # 2 comes back with what follows it when a step that samples 3 is in flight.
    assert [drafts for drafts in sent if drafts] == [{"a": [4, 5, 6]}]


def test_at_depth_2_wrong_drafts_change_no_token() -> None:
    def replies(pipeline_depth: int) -> list[list[int]]:
        harness = SchedulerHarness(
            ChunkedPrefillScheduler,
            pipeline_depth=pipeline_depth,
            num_blocks=12,  # so few that requests are preempted
            drafter=lambda token_ids: [1, 1, 1],
        )
        requests = [harness.add_request(n, [5, 6, 7, len(n)], max_tokens=12) for n in ("a", "bb")]
        harness.run_until_idle()
        assert any(step.scheduled_spec_decode_tokens for step in harness.steps)
        return [request.token_ids for request in requests]

    assert replies(2) == replies(1)


def test_at_depth_2_a_request_whose_drafts_are_not_wanted_is_in_every_step() -> None:
    class Plain(ChunkedPrefillScheduler):
        def schedule(self) -> SchedulerOutput:
            step = self.new_step()
            for request in list(self.running):
                step.run(request, max_tokens=1)
            for request in self.waiting:
                step.admit(request)
            return step.output()

    nums_of_steps = []
    for drafter in (None, lambda token_ids: [1, 1, 1]):
        harness = SchedulerHarness(Plain, pipeline_depth=2, drafter=drafter)
        harness.add_request("a", [5, 6, 7], max_tokens=12)
        harness.run_until_idle()
        nums_of_steps.append(len(harness.steps))
    assert nums_of_steps[0] == nums_of_steps[1]


def test_a_request_says_how_many_of_its_drafts_were_right() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, drafter=lambda token_ids: [1, 1, 1])
    requests = [harness.add_request(name, [3, len(name)], max_tokens=40) for name in ("a", "bc")]
    harness.run_until_idle()
    stats = harness.scheduler.make_stats()
    assert stats is not None
    assert sum(r.num_draft_tokens for r in requests) == stats.num_draft_tokens > 20
    assert sum(r.num_accepted_tokens for r in requests) == stats.num_accepted_tokens
    assert all(0 <= r.num_accepted_tokens < r.num_draft_tokens for r in requests)
