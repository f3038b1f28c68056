"""What is findable when a request has ended: every full block that was computed, and no other."""

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve.request import RequestStatus
from aioserve.testing import SchedulerHarness
from aioserve.testing.ledger import guess


def next_turn(harness: SchedulerHarness, name: str) -> int:
    """Cached tokens of a prompt that goes on where `name` ended; the memory checks each."""
    request = harness.requests[name]
    harness.add_request(f"after {name}", [*request.token_ids, 1, 2], max_tokens=2)
    harness.run_until_idle()
    return harness.requests[f"after {name}"].num_cached_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_output_tokens", "expected"), [(12, 16), (13, 32), (14, 32)])
def test_the_last_full_block_of_a_finished_request_is_found_by_the_next_turn(
    num_output_tokens: int, expected: int, depth: int
) -> None:
    """The last token is never computed: of 20 + 13 tokens there are 32."""
    harness = SchedulerHarness(ChunkedPrefillScheduler, block_size=16, pipeline_depth=depth)
    harness.add_request("a", list(range(20)), max_tokens=num_output_tokens)
    harness.run_until_idle()
    assert next_turn(harness, "a") == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_a_token_ends_leaves_what_was_written_by_then(depth: int) -> None:
    """At depth 2 a step in flight computes the stop token, too; it does not count."""
    free = SchedulerHarness(ChunkedPrefillScheduler)
    free.add_request("a", list(range(20)), max_tokens=40)
    free.run_until_idle()
    tokens = free.tokens["a"]
    for block_size in (3, 4, 7):
        for stop in sorted(set(tokens), key=tokens.index)[:12]:
            harness = SchedulerHarness(
                ChunkedPrefillScheduler, block_size=block_size, pipeline_depth=depth
            )
            harness.add_request("a", list(range(20)), max_tokens=40, eos_token_ids=(stop,))
            harness.run_until_idle()
            num_written = 20 + len(harness.tokens["a"]) - 1
            assert next_turn(harness, "a") == num_written // block_size * block_size


@pytest.mark.parametrize("depth", [1, 2])
def test_whoever_leaves_leaves_the_blocks_of_the_steps_that_are_back(depth: int) -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, block_size=4, pipeline_depth=depth)
    harness.add_request("a", [1, 2, 3], max_tokens=40)
    for _ in range(14):
        harness.step()
    harness.finish("a")
    num_written = 3 + len(harness.tokens["a"]) - 1
    assert len(harness.findable) == num_written // 4
    assert next_turn(harness, "a") == num_written // 4 * 4


def test_draft_tokens_that_were_wrong_are_never_found() -> None:
    for max_tokens in range(1, 30):
        harness = SchedulerHarness(ChunkedPrefillScheduler, block_size=2, drafter=guess)
        harness.add_request("a", [1, 2, 3], max_tokens=max_tokens)
        harness.run_until_idle()
        assert next_turn(harness, "a") == (3 + max_tokens - 1) // 2 * 2


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_of_a_failed_step_is_found(depth: int) -> None:
    """Nor anything of one who left while it was in flight."""
    harness = SchedulerHarness(ChunkedPrefillScheduler, block_size=4, pipeline_depth=depth)
    for name in "ab":
        harness.add_request(name, [ord(name) % 50] * 7, max_tokens=30)
    for _ in range(6):
        harness.step()
    harness.schedule()
    harness.finish("a", RequestStatus.FINISHED_STOPPED)
    harness.fail_steps()
    assert harness.findable == set()
    assert next_turn(harness, "b") == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_fails_takes_no_cached_prefix_of_others_along(depth: int) -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, block_size=4, pipeline_depth=depth)
    shared = [7] * 12
    harness.add_request("old", [*shared, 1, 2], max_tokens=6)
    harness.run_until_idle()
    num_found = next_turn(harness, "old")
    assert num_found == (14 + 6 - 1) // 4 * 4
    # It begins with what is cached, and fails alone; one that waits fails before it has run.
    harness.add_request("bad", [*shared, *range(20, 31)], max_tokens=20)
    for _ in range(3):
        harness.step()
    harness.finish("bad", RequestStatus.FINISHED_ERROR)
    harness.add_request("waits", [*shared, 3, 4, 5], max_tokens=20)
    harness.finish("waits", RequestStatus.FINISHED_ERROR)
    harness.run_until_idle()
    harness.add_request("again", harness.requests["old"].token_ids, max_tokens=2)
    harness.run_until_idle()
    assert harness.requests["again"].num_cached_tokens == num_found
