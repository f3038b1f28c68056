"""What is told about a broken rule: the line of the policy, who waits and why, what happened."""

import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from aioserve.request import WaitReason
from aioserve.scheduler import Request, SchedulerOutput
from aioserve.testing import ContractViolation, SchedulerHarness
from aioserve.testing.story import BROKEN, IN_WORDS, told
from tests.testing.broken import SoundScheduler


class ForgetsAnn(SoundScheduler):
    """Serves nobody called ann, once somebody else is there."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        step.run_decodes()
        for request in self.waiting:
            if request.user != "ann":
                step.admit(request)
        return step.output()


class PreemptsInStepThree(SoundScheduler):
    """And then cannot go on."""

    def schedule(self) -> SchedulerOutput:
        if self.num_steps == 2:
            step = self.new_step()
            step.preempt(self.running[0])
            return step.output()
        if self.num_steps == 5:
            return self.options.nonsense  # type: ignore[no-any-return]
        return super().schedule()


def serve_bob_and_ann(harness: SchedulerHarness) -> None:
    harness.add_request("first", [1] * 6, user="bob", max_tokens=9)
    harness.step()
    harness.add_request("other", [2] * 5, user="ann", priority=2)
    harness.add_request("another", [3] * 5, user="ann")
    harness.run_until_idle()


def wait_long(harness: SchedulerHarness) -> None:
    for i in range(100):
        harness.expire()
        harness.wait(float(i))
    harness.add_request("r1", [1])


def story_of(
    policy: type[SoundScheduler],
    use: Callable[[SchedulerHarness], None] = serve_bob_and_ann,
    *,
    simplest: bool = False,
) -> str:
    harness = SchedulerHarness(policy)
    with pytest.raises(BROKEN) as caught, told(harness, simplest=simplest):
        use(harness)
    (story,) = caught.value.__notes__
    return story


def test_whoever_starves_is_listed_with_user_and_reason() -> None:
    lines = story_of(ForgetsAnn).splitlines()
    assert lines[:3] == [
        "0 run, 2 wait, by user: 'ann' 2",
        "  other of 'ann' waits since second 1 of 39: policy (the policy did not ask for it in its "
        "last step)",
        "  another of 'ann' waits since second 1 of 39: policy (the policy did not ask for it in "
        "its last step)",
    ]
    added = "  after step 1: added with a prompt of 5 tokens, may reach 64 in all, user 'ann', "
    assert lines[4] == added + "priority 2"


class BlamesTheFirst(PreemptsInStepThree):
    """Says who it is about."""

    def schedule(self) -> SchedulerOutput:
        try:
            return super().schedule()
        except AttributeError as error:
            raise RuntimeError("first") from error


def test_the_request_that_is_named_has_its_life_told_step_by_step() -> None:
    lines = story_of(BlamesTheFirst).splitlines()
    start = lines.index("What happened to first:")
    assert lines[start + 1 : start + 6] == [
        "  at first: added with a prompt of 6 tokens, may reach 15 in all, user 'bob'",
        "  step 1: admitted, computes 6 tokens",
        "  step 2: computes 1 token",
        "  step 3: preempted",
        "  step 4: admitted, computes 4 tokens after 4 that are there",
    ]


def test_the_line_of_the_policy_that_raised_is_shown() -> None:
    first = story_of(PreemptsInStepThree).splitlines()[0]
    assert "test_story.py:" in first
    assert first.endswith("schedule(): return self.options.nonsense  # type: ignore[no-any-return]")


def test_the_simplest_program_is_told_instead_if_that_is_wanted() -> None:
    program = story_of(ForgetsAnn, simplest=True).split("To reproduce:")[1]
    assert program.count("add_request") == 1
    assert story_of(ForgetsAnn).count("add_request") == 3


class OrdersNothing(SoundScheduler):
    """Cannot say who goes first."""

    def order(self, request: Request) -> Any:
        raise ValueError


def test_a_long_program_is_cut_in_the_middle() -> None:
    story = story_of(OrdersNothing, wait_long)
    assert len(story.splitlines()) < 30
    assert "lines more" in story
    assert story.endswith("harness.add_request('r1', [1])")


class AdmitsForEver(SoundScheduler):
    """The likeliest slip of all: a head that cannot be admitted is asked again and again."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        while self.waiting:
            step.admit(next(iter(self.waiting)))
        return step.output()


class Sleeps(SoundScheduler):
    """Waits for what never comes, in C."""

    def order(self, request: Request) -> Any:
        threading.Event().wait()


class SwallowsAll(SoundScheduler):
    """Whatever is raised, it tries again."""

    def schedule(self) -> SchedulerOutput:
        for _ in range(3):
            with suppress(BaseException):
                while True:
                    pass
        return super().schedule()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT is Python's own, which alone ends a wait for a lock: a server that ran in this process
    before may have left its own.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def crowd(harness: SchedulerHarness) -> None:
    for i in range(9):  # a seat fewer than that
        harness.add_request(f"r{i}", [i])
    harness.run_until_idle()


@pytest.mark.parametrize(
    ("policy", "method", "line"),
    [
        (AdmitsForEver, "schedule", r"while self.waiting:|step.admit\("),
        (Sleeps, "order", r"threading.Event\(\).wait\(\)"),
    ],
)
@pytest.mark.usefixtures("ctrl_c")
def test_a_call_that_does_not_come_back_breaks_the_contract_at_its_line(
    policy: type[SoundScheduler], method: str, line: str
) -> None:
    harness = SchedulerHarness(policy, call_seconds=0.5)
    asked = {"order": "add_request"}.get(method, method)
    what = rf"did not come back from {asked}\(\)"
    with pytest.raises(ContractViolation, match=what) as caught, told(harness):
        crowd(harness)
    (story,) = caught.value.__notes__
    assert re.search(rf"test_story.py:\d+, {method}\(\): ({line})", story), story
    assert "test_story.py:" in str(caught.value)


def test_a_call_that_swallows_what_ends_it_breaks_the_contract_too() -> None:
    harness = SchedulerHarness(SwallowsAll, call_seconds=0.3)
    with pytest.raises(ContractViolation, match=r"did not come back from schedule\(\)"):
        crowd(harness)


def test_in_another_thread_it_is_ended_as_well() -> None:
    with ThreadPoolExecutor(1) as thread:
        harness = SchedulerHarness(AdmitsForEver, call_seconds=0.5)
        with pytest.raises(ContractViolation, match="did not come back"):
            thread.submit(crowd, harness).result()


def test_ctrl_c_in_a_test_is_still_ctrl_c() -> None:
    class IsStopped(SoundScheduler):
        def schedule(self) -> SchedulerOutput:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crowd(SchedulerHarness(IsStopped))


def test_there_are_words_for_every_reason_to_wait() -> None:
    assert set(IN_WORDS) == set(WaitReason)
