"""The step loop is driven by hand here: no event loop, no thread, and a clock that is a number."""

import subprocess
import sys
from typing import Any

import pytest
from aioserve.policies.fcfs import FCFSScheduler

from aioserve.config import SchedulerConfig
from aioserve.engine.step_loop import StepInFlight, StepLoop, StepObserver
from aioserve.errors import CallInterrupted, PolicyError, StalledError
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import FinishReason, ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.scheduler import SchedulerOutput
from aioserve.scheduler.delegate import DelegatingScheduler, innermost


class Notes(StepObserver):
    """Everything that an observer is told, in a word each."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_added(self, request: Request, now: float) -> None:
        self.lines.append(f"{now:g} added {request.request_id}")

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        self.lines.append(f"{now:g} planned {list(output.num_scheduled_tokens)}")

    def on_back(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        self.lines.append(f"{now:g} back {output.step_id}")

    def on_ended(self, request_ids: list[str], reason: FinishReason, now: float) -> None:
        self.lines.append(f"{now:g} ended {request_ids} {reason}")

    def on_switched(self, settings: SchedulerConfig, now: float) -> None:
        self.lines.append(f"{now:g} switched to {settings.policy}")

    def on_turn_end(self, now: float) -> None:
        self.lines.append(f"{now:g} turn")


class Bench:
    """A loop, its clock, and what a driver does in a turn."""

    def __init__(self, policy: type[FCFSScheduler] = FCFSScheduler, **settings: Any) -> None:
        self.now = 0.0
        config = SchedulerConfig(max_num_seqs=4)
        scheduler = policy(config, KVCacheManager(32, 4), max_model_len=64, clock=self.clock)
        settings = {"depth": 1, **settings}
        self.loop: StepLoop[None] = StepLoop(scheduler, clock=self.clock, **settings)

    def clock(self) -> float:
        return self.now

    def add(self, request_id: str, max_tokens: int = 2) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.loop.add_request(Request(RequestSpec(request_id, [1, 2, 3], params)))

    def result(self, step: StepInFlight[None]) -> ModelRunnerOutput:
        rows = list(step.output.num_scheduled_tokens)
        return ModelRunnerOutput(rows, [[7] for _ in rows])

    def turn(self) -> list[str]:
        """Takes the step that is out, hands over the next; whose last token came."""
        loop, ended = self.loop, []
        if loop.in_flight:
            for outputs in loop.take(self.result(loop.in_flight[0])).values():
                ended = [o.request_id for o in outputs.outputs if o.finish_reason is not None]
        for _ in loop.fill():
            self.now += 1
        loop.end_turn()
        return ended


class Bounded(DelegatingScheduler):
    """As where a driver ends calls that do not come back, by raising in them."""

    def add_request(self, request: Request) -> None:
        try:
            super().add_request(request)
        except CallInterrupted as error:
            raise PolicyError("add_request() takes too long") from error

    def schedule(self) -> SchedulerOutput:
        try:
            return super().schedule()
        except CallInterrupted as error:
            raise PolicyError("schedule() takes too long") from error


def test_a_driver_without_asyncio_serves_requests_to_their_end() -> None:
    bench = Bench()
    bench.add("a", max_tokens=2)
    bench.add("b", max_tokens=3)
    assert [bench.turn() for _ in range(5)] == [[], [], ["a"], ["b"], []]
    assert not bench.loop.in_flight
    assert bench.loop.idle_seconds() is None  # it sleeps until something wakes it


def test_observers_hear_five_events_and_the_ends_of_turns() -> None:
    bench, notes = Bench(), Notes()
    bench.loop.observers.subscribe(notes)
    bench.add("a", max_tokens=1)
    bench.turn()
    bench.turn()
    bench.add("b")
    bench.loop.switch(SchedulerConfig(policy="fcfs"))
    bench.loop.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    assert notes.lines[:6] == [
        "0 added a",
        "1 planned ['a']",
        "1 turn",
        "1 back 1",
        "1 ended ['a'] length",
        "2 planned []",  # the runner hears that a has left
    ]
    assert notes.lines[-3:] == ["2 added b", "2 switched to fcfs", "2 ended ['b'] abort"]
    bench.loop.observers.unsubscribe(notes)
    num_lines = len(notes.lines)
    bench.add("c")
    assert len(notes.lines) == num_lines


def test_an_observer_that_raises_hears_no_more_and_the_others_do() -> None:
    class Raises(StepObserver):
        def on_added(self, request: Request, now: float) -> None:
            raise ValueError("as asked")

    bench, raises, notes = Bench(), Raises(), Notes()
    bench.loop.observers.subscribe(raises)
    bench.loop.observers.subscribe(notes)
    bench.add("a")
    assert isinstance(raises.error, ValueError)
    assert list(bench.loop.observers) == [notes]
    assert notes.lines == ["0 added a"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_takes_all_in_flight_with_it_and_the_next_tells_who_left(depth: int) -> None:
    bench = Bench(depth=depth)
    bench.add("a", max_tokens=9)
    bench.turn()
    assert len(bench.loop.in_flight) == depth
    error = RuntimeError("as asked")
    assert len(bench.loop.fail(error)) == depth
    assert bench.loop.failed == [(["a"], error)]
    bench.add("b", max_tokens=1)
    [step, *_] = bench.loop.fill()
    assert step.told.finished_req_ids == ["a"]
    assert list(step.told.num_scheduled_tokens) == ["b"]


class Idle(FCFSScheduler):
    """Schedules no request."""

    def schedule(self) -> SchedulerOutput:
        return self.new_step().output()


def test_a_policy_that_schedules_nothing_is_asked_until_the_stall_timeout() -> None:
    bench = Bench(Idle, stall_timeout=5.0)
    bench.add("a")
    bench.turn()
    assert bench.loop.idle_seconds() == 0.01
    bench.now = 4.9
    bench.turn()
    assert not bench.loop.failed
    bench.now = 5.0
    bench.turn()
    [(request_ids, error)] = bench.loop.failed
    assert request_ids == ["a"]
    assert isinstance(error, StalledError)


class Raising(FCFSScheduler):
    """Fails at its first call."""

    def schedule(self) -> SchedulerOutput:
        raise KeyError("as asked")


def test_a_simulation_raises_what_a_server_tells_to_its_requests() -> None:
    served, simulated = Bench(Raising), Bench(Raising, raises=True)
    for bench in (served, simulated):
        bench.add("a")
    served.turn()
    [(_, told)] = served.loop.failed
    with pytest.raises(
        PolicyError, match=r"Raising raised KeyError.*\(test_loop.py:\d+\)"
    ) as found:
        simulated.turn()
    assert str(found.value) == str(told)


def test_the_loop_needs_neither_asyncio_streams_nor_the_engine() -> None:
    code = (
        "import sys, aioserve.engine.step_loop; "
        "print([m for m in sys.modules if m.startswith(('torch', 'aiohttp', 'aioserve.engine', "
        "'aioserve.runner', 'aioserve.server'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['aioserve.engine', 'aioserve.engine.step_loop']"


def test_a_plan_that_is_given_up_costs_the_requests_that_it_had_reached_alone() -> None:
    class Interrupted(FCFSScheduler):
        is_ended = False

        def schedule(self) -> SchedulerOutput:
            if not self.is_ended:
                self.is_ended = True
                step = self.new_step()
                for request in self.waiting:
                    step.admit(request)
                    raise CallInterrupted
            return super().schedule()

    bench = Bench(Interrupted)
    bench.add("a")
    bench.add("b")
    bench.loop.scheduler = Bounded(bench.loop.scheduler)
    assert bench.loop.plan() is None
    [(failed, error)] = bench.loop.failed
    assert failed == ["a"]
    assert str(error).startswith("schedule() takes too long (")  # with the line
    step = bench.loop.plan()
    assert step is not None
    assert list(step.output.num_scheduled_tokens) == ["b"]


@pytest.mark.parametrize("preempts", [False, True])
def test_an_order_that_is_given_up_loses_no_request(preempts: bool) -> None:
    """Asked for when a request comes, and when one is preempted."""

    class Interrupted(FCFSScheduler):
        num_raised = 0

        def order(self, request: Request) -> Any:
            if self.num_steps and not self.num_raised and (request.num_preemptions > 0) == preempts:
                self.num_raised += 1
                raise CallInterrupted
            return super().order(request)

        def schedule(self) -> SchedulerOutput:
            if not self.num_steps or self.num_raised or not preempts:
                return super().schedule()
            step = self.new_step()
            step.preempt(self.running[0])
            return step.output()

    bench = Bench(Interrupted)
    bench.loop.scheduler = Bounded(bench.loop.scheduler)
    bench.add("a")
    bench.turn()
    if not preempts:
        with pytest.raises(PolicyError, match=r"add_request\(\) takes too long"):
            bench.add("b")
    assert [name for _ in range(5) for name in bench.turn()] == ["a"]
    scheduler = innermost(bench.loop.scheduler)
    assert isinstance(scheduler, Interrupted)
    assert scheduler.num_raised == bench.loop.failures.count == 1
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv_cache.pool.num_used_blocks == 0
