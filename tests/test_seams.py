"""Where code of others joins, its answers are checked; the message names the method and line."""

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from aioserve import AsyncEngine, SamplingParams
from aioserve.engine.chat.reply_format import ReplyParser
from aioserve.engine.step_loop import Observers
from aioserve.errors import ConfigError, PolicyError, RequestFailedError
from aioserve.features.formats.json_formats import HermesParser
from aioserve.fleet.routing import BaseRouter, Dispatcher, RoutedRequest, RouterError
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import TokenLogprobs
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler import BaseScheduler
from aioserve.testing import SchedulerHarness
from tests.server.serving import SIMULATED


def place(method: Callable[..., Any]) -> str:
    return rf"\(test_seams\.py:{inspect.getsourcelines(method)[1]}\)"


class LoadsNothing(SimulatedRunner):
    async def load(self) -> Any:
        pass


class LoadsAtOnce(SimulatedRunner):
    def load(self) -> Any:
        return self.info


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (LoadsNothing, r"must return a RunnerInfo, got None"),
        (LoadsAtOnce, r"must be async and return a RunnerInfo, got RunnerInfo\("),
    ],
)
async def test_a_runner_that_loads_to_nothing_is_refused_at_its_line(kind: Any, words: str) -> None:
    runner = kind(SIMULATED, ModelInfo(SIMULATED.model))
    expected = rf"{kind.__name__}\.load\(\) {place(kind.load)} {words}"
    with pytest.raises(ConfigError, match=expected):
        async with AsyncEngine(SIMULATED, runner=runner):
            pass


class AnswersWrongly(SimulatedRunner):
    """Returns what `change` makes of a step's future, once."""

    change: Callable[[Any], Any]
    is_due = True

    def execute_model(self, scheduler_output: Any) -> Any:
        found = super().execute_model(scheduler_output)
        if not (self.is_due and scheduler_output.total_num_scheduled_tokens):
            return found
        self.is_due = False
        return self.change(found)


def resolved(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda future: asyncio.ensure_future(changed(future, change))


async def changed(future: Any, change: Callable[[Any], Any]) -> Any:
    return change(await future)


def changes(**fields: Any) -> Callable[[Any], Any]:
    return resolved(lambda result: msgspec.structs.replace(result, **fields))


def told_twice(result: Any) -> Any:
    told = [TokenLogprobs(0.0, 1, [], [])] * 2
    return msgspec.structs.replace(result, logprobs=dict.fromkeys(result.req_ids, told))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda future: None, "must return an asyncio.Future of a ModelRunnerOutput, got None"),
        (resolved(lambda result: None), "must be a ModelRunnerOutput, got None"),
        (
            resolved(lambda result: msgspec.structs.replace(result, sampled_token_ids=[])),
            "has sampled_token_ids of 0 requests; the step has 1",
        ),
        (resolved(told_twice), "has logprobs of 2 tokens for a request with 1"),
        (changes(sampled_token_ids=[[]]), "has no token of a request whose 3 tokens are computed"),
        (changes(sampled_token_ids=[None]), "has None where token ids of a request go"),
        (changes(sampled_token_ids=None), "must have a list as sampled_token_ids, got None"),
        (changes(sampled_token_ids=[[1.5]]), "has 1.5 among token ids"),
        (changes(sampled_token_ids=[[-1]]), "has -1 among token ids"),
        (changes(sampled_token_ids=[[2**70]]), f"has {2**70} among token ids"),
        (changes(sat_out=5), "must have a list as sat_out, got 5"),
        (changes(logprobs="none"), "must have a dict as logprobs, got 'none'"),
        (changes(failed=None), "must have a dict as failed, got None"),
    ],
)
async def test_a_step_whose_result_is_none_fails_alone_and_is_named(
    change: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = AnswersWrongly(SIMULATED, ModelInfo(SIMULATED.model))
    runner.change = change
    params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
    async with AsyncEngine(SIMULATED, runner=runner) as engine:
        with caplog.at_level(logging.ERROR), pytest.raises(RequestFailedError) as caught:
            [_ async for _ in engine.generate([1, 2, 3], params)]
        assert isinstance(caught.value.__cause__, TypeError)
        assert "AnswersWrongly.execute_model() (test_seams.py:" in str(caught.value.__cause__)
        assert words in str(caught.value.__cause__)
        assert words in caplog.text
        assert sum([len(o.token_ids) async for o in engine.generate([1, 2, 3], params)]) == 3


class PlansNothing(BaseScheduler):
    def schedule(self) -> Any:
        self.new_step()


def test_a_policy_that_returns_no_plan_is_told_its_line() -> None:
    harness = SchedulerHarness(PlansNothing)
    harness.add_request("a", [1, 2])
    with pytest.raises(PolicyError, match=rf"got None \(is .* {place(PlansNothing.schedule)}"):
        harness.step()


class ChoosesFive(BaseRouter):
    def choose(self, request: Any, replicas: Any) -> Any:
        return 5

    def rebalance(self, replicas: Any) -> Any:
        return None


def test_a_router_that_returns_no_replica_is_told_its_line() -> None:
    dispatcher = Dispatcher(ChoosesFive, clock=lambda: 0.0)
    dispatcher.join("a")
    with pytest.raises(RouterError, match=rf"got 5 {place(ChoosesFive.choose)}"):
        dispatcher.choose(RoutedRequest(num_tokens=1))
    with pytest.raises(RouterError, match=rf"got None {place(ChoosesFive.rebalance)}"):
        dispatcher.rebalance()


def test_what_is_no_observer_cannot_subscribe() -> None:
    with pytest.raises(TypeError, match="an observer is a StepObserver, got 5"):
        Observers(lambda: 0.0).subscribe(5)  # type: ignore[arg-type]


class TellsNothing(HermesParser):
    def append(self, text: str) -> Any:
        pass

    def flush(self) -> Any:
        return ()


def test_a_format_that_returns_no_events_is_told_its_line() -> None:
    parser = ReplyParser(None, TellsNothing(()))
    told = rf"TellsNothing: append\(\) .* got None {place(TellsNothing.append)}"
    with pytest.raises(TypeError, match=told):
        parser.append("Hello")
    with pytest.raises(TypeError, match=rf"flush\(\) .* got \(\) {place(TellsNothing.flush)}"):
        parser.flush()
