"""The calls of a harness are kept, can be made again, and run when they are printed."""

import pytest

from aioserve.errors import RequestError
from aioserve.request import EncoderInput, RequestStatus
from aioserve.testing import ContractViolation, SchedulerHarness
from aioserve.testing.calls import make_calls, write_program
from aioserve.testing.ledger import guess
from tests.testing.broken import RollsGlobalDice, SoundScheduler


def busy_harness() -> SchedulerHarness:
    """After calls of every kind."""
    harness = SchedulerHarness(
        SoundScheduler, num_blocks=20, block_size=4, pipeline_depth=2, drafter=guess
    )
    harness.add_request("a b'c\"", list(range(30)), max_tokens=5, cache_salt="x")
    with pytest.raises(RequestError):
        harness.add_request("a b'c\"", [1])
    image = EncoderInput(0, 2, "image")
    harness.add_request("b", [1] * 9, encoder_inputs=(image,), eos_token_ids=tuple(range(40)))
    harness.plan()
    harness.receive()
    harness.step()
    harness.wait(2.5)
    harness.step()
    harness.discard_step()
    harness.add_request("c", [2, 2, 3], deadline=90.0)
    harness.plan()
    harness.fail_steps()
    harness.finish(["b", "c"], status=RequestStatus.FINISHED_STOPPED)
    harness.reset_prefix_cache()
    harness.run_until_idle()
    harness.check_repeatable()
    return harness


def test_a_printed_program_does_what_the_calls_did() -> None:
    harness, names = busy_harness(), {}
    exec(write_program(harness), names)
    again = names["harness"]
    assert again.steps == harness.steps
    assert again.tokens == harness.tokens
    assert again.now == harness.now
    assert [call.method for call in again.calls] == [call.method for call in harness.calls]


def test_calls_of_methods_by_methods_are_not_kept() -> None:
    harness = SchedulerHarness(SoundScheduler)
    harness.add_request("a", [1])
    harness.run_until_idle()
    assert [call.method for call in harness.calls] == ["add_request", "run_until_idle"]


def test_what_nobody_could_call_as_things_stand_is_left_out() -> None:
    harness = busy_harness()
    again = SchedulerHarness(SoundScheduler)
    make_calls(again, [call for call in harness.calls if call.method in ("receive", "fail_steps")])
    assert again.calls == []


def test_plans_that_depend_on_more_than_the_calls_are_found() -> None:
    with pytest.raises(ContractViolation, match="the same events gave another plan"):  # noqa: PT012
        for _ in range(20):
            harness = SchedulerHarness(RollsGlobalDice, max_num_seqs=1)
            for i in range(5):
                harness.add_request(f"r{i}", [1], max_tokens=1)
            harness.run_until_idle()
            harness.check_repeatable()
