"""A policy's ranks decide what a connector evicts from host memory, as from the KV cache."""

import pytest

from aioserve.scheduler import load_policy
from aioserve.testing import SchedulerHarness

SOON, LATE = [1] * 24, [2] * 24


def found(policy: str) -> tuple[int, int]:
    """Tokens that are cached of a prefix which a workflow needs after 2 calls, and those of them
    that come from host memory: of the 24 blocks that are saved there, it holds 12.
    """
    harness = SchedulerHarness(
        load_policy(policy),
        num_blocks=8,
        num_host_slots=12,
        kv_connector="memory",
        max_num_seqs=1,
        max_model_len=32,
        max_num_batched_tokens=32,
        watermark=0,
    )

    def serve(name: str, prompt: list[int], **hints: str | int) -> None:
        harness.add_request(name, prompt, max_tokens=2, hints=hints)
        harness.run_until_idle()

    serve("soon", SOON, program="w", steps_to_next_use=2)
    serve("late", LATE, program="w", steps_to_next_use=9)
    for i in range(2):  # of no workflow
        serve(f"other{i}", [3 + i] * 24)
    serve("again", [*SOON, 9])
    request = harness.requests["again"]
    return request.num_cached_tokens, request.num_external_tokens


@pytest.mark.usefixtures("at_any_price")
def test_host_memory_keeps_what_the_workflow_needs_next() -> None:
    cached, loaded = found("zoo.kvflow")
    assert cached == 24
    assert loaded >= 20
    cached, _ = found("zoo.prefill_first")  # the least recently used goes first
    assert cached < 8
