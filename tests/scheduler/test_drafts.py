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
