"""What a test author can do with the harness, besides letting time pass."""

import re
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fair import FairScheduler
from aioserve.policies.fcfs import FCFSScheduler

from aioserve.errors import ConfigError, PolicyError
from aioserve.fleet import autoscalers
from aioserve.outputs import FinishReason
from aioserve.params import SamplingParams, StructuredOutputs
from aioserve.request import Request, RequestSpec
from aioserve.scheduler import BaseScheduler, RequestQueue
from aioserve.testing import ContractViolation, SchedulerHarness
from aioserve.testing.calls import make_calls, write_program
from aioserve.testing.cost import Lines, count_lines
from aioserve.testing.harness import FAILURES, FailsToTakeOver

EOS = 2
PAGE = Path(__file__).parents[2] / "docs/writing-a-policy.md"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_gets_the_reply_that_the_test_gives_it(depth: int) -> None:
    harness = SchedulerHarness(FCFSScheduler, pipeline_depth=depth)
    harness.add_request("a", [1] * 5, reply=[7, 8, EOS, 9], eos_token_ids=(EOS,))
    harness.add_request("b", [1] * 5, reply=[7, 8], max_tokens=4)
    harness.run_until_idle()
    assert harness.tokens["a"] == [7, 8, EOS]
    assert harness.finished["a"] is FinishReason.STOP
    assert harness.tokens["b"][:2] == [7, 8]
    assert len(harness.tokens["b"]) == 4  # the rest is made up
    assert harness.finished["b"] is FinishReason.LENGTH


def test_several_tokens_of_a_reply_come_at_once() -> None:
    harness = SchedulerHarness(FCFSScheduler)
    harness.add_request("a", [1] * 5, reply=[7, [8, 9, EOS], 4], eos_token_ids=(EOS,))
    received = []
    while "a" not in harness.finished:
        harness.step()
        received.append(list(harness.tokens["a"]))
    assert received == [[7], [7, 8, 9, EOS]]
    assert harness.steps[1].scheduled_spec_decode_tokens == {"a": [8, 9]}
    harness.run_until_idle()


def test_a_reply_goes_on_after_a_preemption() -> None:
    harness = SchedulerHarness(
        FCFSScheduler, num_blocks=10, max_num_seqs=2, max_model_len=32, pipeline_depth=2
    )
    reply = list(range(20, 34))
    for name in "ab":
        harness.add_request(name, [ord(name) % 50] * 16, max_tokens=14, reply=reply)
    harness.run_until_idle()
    assert harness.requests["b"].num_preemptions > 0
    assert harness.tokens == {"a": reply, "b": reply}


@pytest.mark.parametrize("depth", [1, 2])
def test_masked_replies_keep_to_their_choices_through_preemptions(depth: int) -> None:
    harness = SchedulerHarness(
        FCFSScheduler, num_blocks=10, max_num_seqs=3, max_model_len=32, pipeline_depth=depth
    )
    choices = ("abcdefghijkl", "abcduvwxyz")
    wanted = StructuredOutputs(choice=choices)
    for name in "ab":
        harness.add_request(
            name, [ord(name) % 50] * 16, structured_outputs=wanted, eos_token_ids=(0,)
        )
    harness.add_request("free", [3] * 16, max_tokens=14)
    harness.run_until_idle()
    assert sum(request.num_preemptions for request in harness.requests.values()) > 0
    texts = [tuple(ord(char) - 96 for char in text) for text in choices]
    for name in "ab":
        assert harness.finished[name] is FinishReason.STOP
        assert tuple(harness.tokens[name][:-1]) in texts
    drafts = [step.scheduled_spec_decode_tokens for step in harness.steps]
    # What has no alternative comes at once, behind the token of the step in flight if there is one.
    assert any("a" in own for own in drafts)
    assert len(harness.tokens["free"]) == 14


def test_a_request_arrives_when_the_test_says() -> None:
    harness = SchedulerHarness(FCFSScheduler, max_num_seqs=1)
    harness.now = 9.0
    harness.add_request("second", [1] * 5, max_tokens=1)
    harness.add_request("first", [1] * 5, max_tokens=1, arrival_time=3.0)
    assert harness.requests["second"].arrival_time == 9.0
    harness.run_until_idle()
    entered = [data.request_id for step in harness.steps for data in step.scheduled_new_reqs]
    assert entered == ["first", "second"]


def test_every_step_that_a_call_plans_is_returned() -> None:
    harness = SchedulerHarness(FCFSScheduler, pipeline_depth=2)
    harness.add_request("a", [1] * 5, max_tokens=9)
    assert [step.step_id for step in harness.step()] == [1, 2]
    assert [step.step_id for step in harness.step()] == [3]
    harness.run_until_idle()
    assert harness.step() == []


@pytest.mark.parametrize("depth", [1, 2])
def test_the_policy_is_switched_and_switched_back(depth: int) -> None:
    harness = SchedulerHarness(
        ChunkedPrefillScheduler, options={"chunk_size": 4}, pipeline_depth=depth
    )
    for i in range(4):
        harness.add_request(f"r{i}", [i] * 20, max_tokens=9, user="ab"[i % 2])
    harness.step()
    harness.switch_policy(FairScheduler, {"chunk_size": 8})
    harness.step()
    assert isinstance(harness.scheduler, FairScheduler)
    assert harness.steps[-1].total_num_scheduled_tokens == 8
    harness.switch_policy(ChunkedPrefillScheduler, {"chunk_size": 4})
    harness.run_until_idle()
    assert set(harness.finished.values()) == {FinishReason.LENGTH}


def test_a_switch_that_is_refused_changes_nothing() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler, max_num_batched_tokens=32)
    for i in range(3):
        harness.add_request(f"r{i}", [i] * 20, max_tokens=9)
    harness.step()
    old = harness.scheduler
    with pytest.raises(ConfigError, match="FCFSScheduler runs whole prompts"):
        harness.switch_policy(FCFSScheduler)
    with pytest.raises(ConfigError, match="chunk_sise"):
        harness.switch_policy(ChunkedPrefillScheduler, {"chunk_sise": 4})
    with pytest.raises(PolicyError, match="FailsToTakeOver raised"):
        harness.switch_policy(FailsToTakeOver)
    assert harness.scheduler is old
    for where in FAILURES:
        harness.fail_switch(where)
    harness.run_until_idle()


def test_a_policy_that_loses_somebody_at_a_switch_is_caught() -> None:
    class Forgets(FCFSScheduler):
        def take_over(self, other: BaseScheduler) -> None:
            super().take_over(other)
            self.book.running.clear()

    harness = SchedulerHarness(FCFSScheduler)
    harness.add_request("a", [1] * 5)
    harness.step()
    with pytest.raises(ContractViolation, match="a has status RUNNING and is in neither"):
        harness.switch_policy(Forgets)


def test_replies_and_switches_are_made_again_and_written_down() -> None:
    harness = SchedulerHarness(FCFSScheduler)
    harness.add_request("a", [1] * 5, reply=[7, [8, 9, EOS]], eos_token_ids=(EOS,))
    harness.step()
    harness.switch_policy(FairScheduler, {"quantum": 5.0})
    harness.fail_switch("order")
    harness.run_until_idle()
    again = SchedulerHarness(FCFSScheduler)
    make_calls(again, harness.calls)
    assert again.steps == harness.steps
    program = write_program(harness)
    names: dict[str, SchedulerHarness] = {}
    exec(program, names)
    assert names["harness"].steps == harness.steps
    assert names["harness"].tokens == {"a": [7, 8, 9, EOS]}


def test_an_error_of_the_policy_is_tolerated_if_the_test_says_so() -> None:
    class Raises(FCFSScheduler):
        def victim(self) -> None:
            raise ValueError("planted")

    harness = SchedulerHarness(
        Raises, num_blocks=10, max_num_seqs=2, max_model_len=32, tolerates_errors=True
    )
    for name in "ab":
        harness.add_request(name, [ord(name) % 50] * 16, max_tokens=14)
    harness.run_until_idle()
    assert harness.errors
    assert FinishReason.ERROR in harness.finished.values()


def test_an_insert_of_a_policy_costs_by_the_items_and_one_of_the_waiting_line_does_not() -> None:
    own, of_policy, of_shipped, of_line = list(range(500)), Lines(), Lines(), Lines()

    def insert(items: list[int]) -> None:
        items.insert(0, 1)

    count_lines(partial(insert, own), of_policy)
    shipped = FunctionType(insert.__code__, vars(autoscalers))  # as if it were of that module
    count_lines(partial(shipped, own), of_shipped)
    queue = RequestQueue()
    for number in range(500):
        request = Request(RequestSpec(str(number), [1], SamplingParams()))
        request.order_key = (0, number)
        of_line.clear()
        count_lines(partial(queue.add, request), of_line)
    assert of_policy.total() >= 500 > of_line.total() > 0
    assert of_shipped.total() >= 500


def test_the_program_of_the_page_on_writing_a_policy_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (program,) = [block for block in blocks if "harness.switch_policy" in block]
    names: dict[str, SchedulerHarness] = {}
    exec(program, names)
    assert names["harness"].requests["early"].num_cached_tokens == 0
