"""Requests whose blocks a KV connector reads, and a policy that cannot put them in line then."""

from typing import Any

import pytest

from aioserve.outputs import FinishReason
from aioserve.request import Request
from aioserve.testing import SchedulerHarness
from tests.testing.broken import SoundScheduler

PROMPT = [7] * 30


class Key:
    """All are equal, while they can be compared."""

    num_failures = 0  # still to come

    def __lt__(self, other: Any) -> bool:
        if Key.num_failures:
            Key.num_failures -= 1
            raise ValueError("planted in a comparison")
        return False


class Undecided(SoundScheduler):
    def order(self, request: Request) -> Any:
        return Key()


def loading() -> SchedulerHarness:
    """One request runs, one waits, and of the third the blocks have been read."""
    harness = SchedulerHarness(
        Undecided, kv_connector="disk", num_host_slots=30, max_num_seqs=1, tolerates_errors=True
    )
    harness.add_request("first", PROMPT, max_tokens=2)
    harness.run_until_idle()
    harness.reset_prefix_cache()
    harness.add_request("runs", [1] * 5, max_tokens=20)
    harness.step()
    harness.add_request("waits", [2] * 5, max_tokens=2)
    harness.add_request("loads", PROMPT, max_tokens=2)
    while harness.store:
        harness.blocks_come()
    return harness


def test_a_request_that_cannot_be_put_in_line_is_put_there_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = loading()
    monkeypatch.setattr(Key, "num_failures", 1)
    harness.step()
    assert len(harness.errors) == 1
    harness.run_until_idle()
    assert harness.requests["loads"].num_external_tokens == 28
    assert set(harness.finished.values()) == {FinishReason.LENGTH}


def test_a_client_that_leaves_then_is_not_put_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = loading()
    monkeypatch.setattr(Key, "num_failures", 1)
    harness.step()
    harness.finish("loads")
    harness.run_until_idle()
    assert harness.finished["loads"] is FinishReason.ABORT
