"""Large images beside decodes: encoded over several steps, before their tokens run."""

from typing import Any

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fcfs import FCFSScheduler

from aioserve.kv_cache import Ahead
from aioserve.request import EncoderInput, RequestStatus, WaitReason
from aioserve.testing import SchedulerHarness

CAT = EncoderInput(2, 10, "cat")


def beside_a_stream(policy: Any = ChunkedPrefillScheduler, **settings: Any) -> SchedulerHarness:
    """With a request that decodes, and one with a large image that has just come."""
    harness = SchedulerHarness(policy, **{"encoder_chunk_tokens": 4, **settings})
    harness.add_request("stream", [7] * 3, max_tokens=40)
    harness.step()
    harness.step()
    harness.add_request("cat", [1] * 20, encoder_inputs=[CAT], max_tokens=3)
    return harness


def pieces(harness: SchedulerHarness) -> list[tuple[int, int]]:
    found = [Ahead.of(step.parts) for step in harness.steps]
    return [(ahead.num_before, ahead.done) for ahead in found if ahead is not None]


@pytest.mark.parametrize("policy", [ChunkedPrefillScheduler, FCFSScheduler])
def test_an_image_is_encoded_in_pieces_and_every_step_decodes(policy: Any) -> None:
    harness = beside_a_stream(policy)
    begin = len(harness.steps)
    while not any("cat" in step.scheduled_encoder_inputs for step in harness.steps):
        harness.step()
        assert "stream" in harness.steps[-1].num_scheduled_tokens
        if len(pieces(harness)) == 3:
            break
    assert pieces(harness) == [(0, 4), (4, 8), (8, 10)]
    assert len(harness.steps) - begin <= 4
    harness.run_until_idle()
    assert not any(step.scheduled_encoder_inputs for step in harness.steps)
    stats = harness.scheduler.make_stats()
    assert (stats.num_encoder_inputs, stats.num_encoder_tokens) == (1, 10)
    assert stats.num_encoder_hits == 0


def test_an_image_waits_with_a_reason_while_it_is_encoded() -> None:
    harness = beside_a_stream(FCFSScheduler)
    harness.schedule()
    assert harness.scheduler.get_wait_reasons() == {"cat": WaitReason.ENCODER_BUDGET}


@pytest.mark.parametrize("chunk", [0, 10])
def test_an_image_that_a_step_may_encode_is_not_delayed(chunk: int) -> None:
    harness = beside_a_stream(encoder_chunk_tokens=chunk)
    harness.step()
    assert harness.steps[-1].scheduled_encoder_inputs == {"cat": [0]}
    harness.run_until_idle()
    assert pieces(harness) == []


def test_an_image_that_no_other_request_runs_beside_is_encoded_at_once() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, encoder_chunk_tokens=4)
    harness.add_request("small", [1] * 4, encoder_inputs=[EncoderInput(1, 2, "small")])
    harness.run_until_idle()
    harness.add_request("cat", [1] * 20, encoder_inputs=[CAT], max_tokens=3)
    harness.step()
    assert harness.steps[-1].scheduled_encoder_inputs == {"cat": [0]}


@pytest.mark.parametrize("policy", [ChunkedPrefillScheduler, FCFSScheduler])
def test_the_first_image_of_all_is_encoded_at_once_where_it_is_alone(policy: Any) -> None:
    harness = SchedulerHarness(policy, encoder_chunk_tokens=4)
    harness.add_request("cat", [1] * 20, encoder_inputs=[CAT], max_tokens=3)
    harness.run_until_idle()
    assert pieces(harness) == []
    assert sum(step.scheduled_encoder_inputs == {"cat": [0]} for step in harness.steps) == 1


def test_the_rest_of_an_image_is_encoded_at_once_when_the_others_have_ended() -> None:
    harness = beside_a_stream()
    harness.step()
    assert pieces(harness) == [(0, 4)]
    harness.finish("stream", RequestStatus.FINISHED_ABORTED)
    harness.step()
    assert harness.steps[-1].scheduled_encoder_inputs == {"cat": [0]}
    assert harness.steps[-1].free_encoder_hashes == []  # the runner goes on with what it has
    harness.run_until_idle()


def test_what_is_begun_is_dropped_with_its_request() -> None:
    harness = beside_a_stream()
    harness.step()
    harness.finish("cat", RequestStatus.FINISHED_ABORTED)
    harness.step()
    assert harness.steps[-1].free_encoder_hashes == ["cat"]
    assert harness.scheduler.make_stats().num_used_encoder_tokens == 0


def test_two_requests_with_one_image_have_it_encoded_once() -> None:
    harness = beside_a_stream()
    harness.add_request("too", [2] * 20, encoder_inputs=[CAT], max_tokens=3)
    harness.run_until_idle()
    assert pieces(harness) == [(0, 4), (4, 8), (8, 10)]
    stats = harness.scheduler.make_stats()
    assert (stats.num_encoder_inputs, stats.num_encoder_hits) == (1, 1)


def test_many_small_images_of_a_prompt_are_spread_over_steps_too() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, encoder_chunk_tokens=4)
    harness.add_request("stream", [7] * 3, max_tokens=40)
    harness.step()
    items = [EncoderInput(3 * number, 3, f"image {number}") for number in range(5)]
    harness.add_request("many", [1] * 20, encoder_inputs=items, max_tokens=3)
    harness.run_until_idle()
    for step in harness.steps:
        indices = step.scheduled_encoder_inputs.get("many", [])
        ahead = Ahead.of(step.parts)
        assert 3 * len(indices) + (0 if ahead is None else ahead.num_tokens) <= 4


@pytest.mark.parametrize("sizes", [(1, 2, 4), (1, 4), (2, 3)])
def test_an_image_begun_for_a_request_leaves_room_for_those_before_it(sizes: tuple[int]) -> None:
    harness = SchedulerHarness(
        ChunkedPrefillScheduler,
        num_blocks=34,
        block_size=1,
        max_model_len=20,
        encoder_cache_tokens=4,
        encoder_chunk_tokens=1,
    )
    harness.add_request("stream", [6] * 16)  # while it runs there are no blocks for the other
    images = [EncoderInput(5 * i, size, f"image {i}") for i, size in enumerate(sizes)]
    harness.add_request("seeing", [0] * 19, encoder_inputs=images)
    harness.run_until_idle()
    assert set(harness.finished) == {"stream", "seeing"}
