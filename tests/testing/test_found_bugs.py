"""What the contract has found in the scheduler itself, each as a short program that shows it."""

import pytest

from aioserve.request import EncoderInput
from aioserve.scheduler import SchedulerOutput, Step
from aioserve.testing import SchedulerHarness
from aioserve.testing.ledger import guess
from tests.testing.broken import SoundScheduler

SMALL, LARGE = EncoderInput(0, 2, "small"), EncoderInput(2, 3, "large")


def test_an_image_that_is_kept_makes_room_for_the_one_before_it() -> None:
    """Two images do not fit together; the later one was kept from before a preemption."""
    harness = SchedulerHarness(SoundScheduler, max_encoder_tokens=8, encoder_cache_tokens=4)
    harness.add_request("a", [2, 3, 4], encoder_inputs=[EncoderInput(0, 3, "large")], max_tokens=2)
    harness.run_until_idle()
    harness.add_request("b", [1] * 5, encoder_inputs=[SMALL, LARGE], max_tokens=2)
    harness.run_until_idle()


def test_a_request_fits_the_pool_alone_with_room_for_drafts() -> None:
    harness = SchedulerHarness(
        SoundScheduler,
        num_blocks=7,
        block_size=1,
        max_model_len=8,
        num_lookahead_tokens=3,
        drafter=guess,
    )
    harness.add_request("a", [1] * 6)
    harness.run_until_idle()


@pytest.mark.parametrize("failure", ["discard_step", "fail_steps"])
def test_an_image_is_computed_again_if_its_step_failed(failure: str) -> None:
    harness = SchedulerHarness(SoundScheduler)
    harness.add_request("a", [1] * 5, encoder_inputs=[SMALL])
    if failure == "fail_steps":
        harness.schedule()
    getattr(harness, failure)()
    harness.add_request("b", [1] * 5, encoder_inputs=[SMALL])
    harness.run_until_idle()


def test_images_dropped_by_a_plan_that_is_not_used_are_told_with_the_next() -> None:
    harness = SchedulerHarness(SoundScheduler, max_encoder_tokens=4, encoder_cache_tokens=4)
    harness.add_request("a", [1] * 5, encoder_inputs=[EncoderInput(0, 3, "old")], max_tokens=1)
    harness.run_until_idle()
    harness.add_request("b", [2] * 5, encoder_inputs=[SMALL], max_tokens=1)
    harness.discard_step()
    harness.add_request("c", [3] * 5, encoder_inputs=[SMALL], max_tokens=1)
    harness.run_until_idle()


class PreemptsWhatItAdmits(SoundScheduler):
    """In step 3, and so plans nothing."""

    def new_step(self, token_budget: int | None = None) -> Step:
        step = super().new_step(token_budget)
        if step.step_id == 3:
            for request in self.waiting:
                step.admit(request)
                step.preempt(request)
        return step


def test_images_dropped_in_an_empty_step_are_told_with_the_next() -> None:
    """The runner never sees a step without tokens, endings or preemptions."""
    harness = SchedulerHarness(PreemptsWhatItAdmits, max_encoder_tokens=4, encoder_cache_tokens=4)
    harness.add_request("a", [1] * 5, encoder_inputs=[EncoderInput(0, 3, "old")], max_tokens=1)
    harness.step()
    harness.step()
    harness.add_request("b", [2] * 5, encoder_inputs=[SMALL], max_tokens=1)
    assert harness.schedule().free_encoder_hashes == []
    harness.run_until_idle()


def test_the_deadline_of_an_ended_request_does_not_end_a_later_one_of_the_same_name() -> None:
    harness = SchedulerHarness(SoundScheduler)
    harness.add_request("a", [1] * 5, deadline=3.0)
    harness.finish("a")
    harness.add_request("a", [1] * 5, max_tokens=9)
    harness.run_until_idle()
    assert harness.finished["a"] == "length"


class SharesAnImage(SoundScheduler):
    """In step 1 admits all, then preempts the first."""

    def schedule(self):  # type: ignore[no-untyped-def]
        if self.num_steps > 0:
            return super().schedule()
        step = self.new_step()
        for request in self.waiting:
            step.admit(request)
        step.preempt(self.running[0])
        return step.output()


def test_whoever_reads_an_image_computed_by_another_goes_when_the_other_goes() -> None:
    harness = SchedulerHarness(SharesAnImage)
    for number in (1, 2):
        harness.add_request(f"r{number}", [number] * 5, encoder_inputs=[SMALL], max_tokens=3)
    assert harness.schedule().num_scheduled_tokens == {}
    harness.run_until_idle()


@pytest.mark.slow
def test_requests_that_failed_together_are_forgotten_in_their_order() -> None:
    """Else slots come back in another order each time, and the same events give other plans."""
    for _ in range(10):  # the order of a set of requests is one of chance
        harness = SchedulerHarness(SoundScheduler, num_state_slots=9, pipeline_depth=2)
        harness.add_request("r4", [0] * 5 + [1] * 3, max_tokens=6)
        harness.add_request("r5", [0] * 8)
        harness.step()
        harness.fail_steps()
        harness.add_request("r2", [0])
        harness.add_request("r10", [0] * 4)
        harness.run_until_idle()
        harness.check_repeatable()


class TakesBack(SoundScheduler):
    """Preempts request `loads` in the first step that admits it."""

    has_taken = False

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in [*self.running, *self.waiting]:
            step.run(request)
            if step.admit(request) and request.request_id == "loads" and not self.has_taken:
                step.preempt(request)
                self.has_taken = True
        return step.output()


def test_a_block_whose_load_never_came_is_not_found() -> None:
    """The prefix is in host memory. The step that would load it is not computed, and the request
    that it was for has been preempted in it.
    """
    harness = SchedulerHarness(
        TakesBack, num_blocks=8, block_size=2, kv_connector="memory", max_model_len=16
    )
    harness.add_request("first", [1] * 9, max_tokens=1)
    harness.run_until_idle()
    harness.add_request("evicts", [2] * 14, max_tokens=2)
    harness.run_until_idle()
    loads = harness.add_request("loads", [1] * 9, max_tokens=1)
    harness.add_request("beside", [3], max_tokens=1)
    harness.discard_step()  # plans one, which is not handed over
    assert loads.num_external_tokens
    harness.add_request("again", [1] * 9, max_tokens=1)
    harness.run_until_idle()


@pytest.fixture
def with_failed_copies() -> SchedulerHarness:
    """A step that only tells the runner of an end and copies the request's blocks has failed."""
    harness = SchedulerHarness(SoundScheduler, num_blocks=8, block_size=2, kv_connector="disk")
    harness.add_request("a", [1] * 9, max_tokens=1)
    harness.step()
    ends = harness.schedule()
    assert ends.kv_connector_metadata is not None
    assert not ends.num_scheduled_tokens
    harness.fail_steps()
    return harness


def test_slots_of_a_failed_step_without_requests_come_back(
    with_failed_copies: SchedulerHarness,
) -> None:
    with_failed_copies.check_idle()


def test_blocks_that_a_failed_step_without_requests_was_to_copy_are_not_found(
    with_failed_copies: SchedulerHarness,
) -> None:
    harness = with_failed_copies
    for name, token_id in (("evicts", 2), ("again", 1)):
        harness.add_request(name, [token_id] * 12, max_tokens=2)
        harness.run_until_idle()
