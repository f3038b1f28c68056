"""Images under the base scheduler: what is refused at the door, and what is counted."""

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fcfs import FCFSScheduler

from aioserve.errors import RequestError
from aioserve.outputs import SchedulerStats
from aioserve.request import EncoderInput, WaitReason
from aioserve.scheduler import SchedulerOutput
from aioserve.testing import SchedulerHarness

CAT, DOG = EncoderInput(0, 3, "cat"), EncoderInput(5, 3, "dog")


def counts(harness: SchedulerHarness) -> tuple[int, int, int, int]:
    stats = harness.scheduler.make_stats()
    assert isinstance(stats, SchedulerStats)
    return (
        stats.num_encoder_inputs,
        stats.num_encoder_tokens,
        stats.num_encoder_hits,
        stats.num_used_encoder_tokens,
    )


def test_an_image_of_ten_requests_is_encoded_once() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler)
    for number in range(10):
        harness.add_request(f"r{number}", [number + 9] * 9, encoder_inputs=[CAT], max_tokens=2)
    harness.run_until_idle()
    assert counts(harness) == (1, 3, 9, 3)
    harness.add_request("other", [1] * 9, encoder_inputs=[CAT, DOG], max_tokens=2)
    harness.run_until_idle()
    assert counts(harness) == (2, 6, 10, 6)


def test_an_image_that_steps_share_counts_once() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, max_num_batched_tokens=2)
    harness.add_request("slow", [1] * 9, encoder_inputs=[CAT], max_tokens=2)
    harness.run_until_idle()
    assert len(harness.steps) > 4
    assert counts(harness) == (1, 3, 0, 3)


def test_marks_among_the_tokens_of_an_image_take_no_room_of_the_encoder() -> None:
    """Rows of an image are parted by tokens of the text: budget and cache have room for both."""
    limits = {"max_encoder_tokens": 4, "encoder_cache_tokens": 8}
    harness = SchedulerHarness(ChunkedPrefillScheduler, **limits)
    for number in range(2):
        item = EncoderInput(1, 7, f"rows {number}", num_embeds=4)
        harness.add_request(f"r{number}", [number] * 12, encoder_inputs=[item], max_tokens=2)
    harness.run_until_idle()
    assert counts(harness) == (2, 8, 0, 8)


class TakesBack(ChunkedPrefillScheduler):
    """In its first step admits all, and preempts them at once."""

    def schedule(self) -> SchedulerOutput:
        if self.num_steps:
            return super().schedule()
        step = self.new_step()
        for request in self.waiting:
            step.admit(request)
        for request in self.running:
            step.preempt(request)
        return step.output()


def test_an_image_that_was_planned_and_taken_back_is_not_counted() -> None:
    harness = SchedulerHarness(TakesBack)
    harness.add_request("cat", [1] * 9, encoder_inputs=[CAT], max_tokens=2)
    harness.schedule()
    assert counts(harness) == (0, 0, 0, 0)
    harness.run_until_idle()
    assert counts(harness) == (1, 3, 0, 3)


def test_an_image_that_waits_for_room_says_so() -> None:
    harness = SchedulerHarness(
        ChunkedPrefillScheduler, max_encoder_tokens=4, encoder_cache_tokens=4
    )
    harness.add_request("cat", [1] * 9, encoder_inputs=[CAT], max_tokens=2)
    harness.add_request("dog", [2] * 9, encoder_inputs=[EncoderInput(0, 3, "dog")], max_tokens=2)
    harness.schedule()
    assert harness.scheduler.get_wait_reasons() == {"dog": WaitReason.ENCODER_BUDGET}
    harness.run_until_idle()
    assert counts(harness) == (2, 6, 0, 3)


@pytest.mark.parametrize(("num_lookahead_tokens", "most"), [(0, 13), (2, 7)])
def test_an_image_that_runs_whole_runs_beside_a_full_house_or_is_refused(
    num_lookahead_tokens: int, most: int
) -> None:
    harness = SchedulerHarness(
        ChunkedPrefillScheduler,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        num_lookahead_tokens=num_lookahead_tokens,
    )
    large = EncoderInput(4, most + 1, "large", whole=True)
    with pytest.raises(
        RequestError, match=rf"decode with drafts of each of max_num_seqs, .* is {most}$"
    ):
        harness.add_request("large", [1] * 30, encoder_inputs=[large])
    for number in range(40):  # others come all the time, and keep every seat taken
        harness.add_request(f"r{number}", [number] * 3, max_tokens=20)
        if number == 3:
            fits = EncoderInput(4, most, "fits", whole=True)
            harness.add_request("fits", [1] * 30, encoder_inputs=[fits], max_tokens=1)
    while "fits" not in harness.finished:
        harness.step()
    assert len(harness.scheduler.waiting) > 20


def test_an_image_that_could_never_run_is_refused_by_its_number() -> None:
    limits = {"max_encoder_tokens": 5, "encoder_cache_tokens": 4}
    chunked = SchedulerHarness(ChunkedPrefillScheduler, **limits)
    large = EncoderInput(0, 5, "large")
    chunked.add_request("two", [1] * 9, encoder_inputs=[CAT, DOG])
    with pytest.raises(RequestError, match=r"encoder_inputs\[1\] .* 5 tokens, .* is 4") as raised:
        chunked.add_request(
            "large", [1] * 20, encoder_inputs=[CAT, EncoderInput(5, 5, "large"), DOG]
        )
    assert raised.value.param == "encoder_inputs[1]"
    whole = SchedulerHarness(FCFSScheduler, **limits)
    whole.add_request("one", [1] * 9, encoder_inputs=[CAT])
    for items, message in (
        ([CAT, DOG], r"encoder_inputs\[1\] .* with those before it, 6 tokens"),
        ([large, DOG], r"encoder_inputs\[0\] does not fit: it has 5 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            whole.add_request("more", [1] * 9, encoder_inputs=items)
