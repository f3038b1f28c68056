"""A policy may do anything: its requests get an error that names it, and the engine goes on."""

import asyncio
import logging
import random
import re
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig
from aioserve.engine import builder
from aioserve.engine.operations import HealthCheck
from aioserve.engine.stream import RequestStream
from aioserve.errors import PolicyError, RequestFailedError
from aioserve.lab import VirtualClockEventLoop
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput, RequestOutput
from aioserve.request import RequestStatus
from aioserve.scheduler import Request, SchedulerInterface, SchedulerOutput
from tests.kit import stats_of
from tests.processes import PATIENCE
from tests.slow import mostly_slow

BAD = 13  # a prompt that begins with this token provokes the policy


class Provoked(ChunkedPrefillScheduler):
    """Chunked prefill, until a request comes that begins with BAD."""

    @property
    def is_provoked(self) -> bool:
        return any(r.token_ids[0] == BAD for r in (*self.waiting, *self.running))


class RaisesFirst(Provoked):
    def schedule(self) -> SchedulerOutput:
        if self.is_provoked:
            raise ValueError("no idea")
        return super().schedule()


class RaisesMidway(Provoked):
    def schedule(self) -> SchedulerOutput:
        if not self.is_provoked:
            return super().schedule()
        step = self.new_step()
        for request in self.waiting:
            step.admit(request)
        raise ValueError("no idea")


class Cancels(Provoked):
    def schedule(self) -> SchedulerOutput:
        if self.is_provoked:
            raise asyncio.CancelledError
        return super().schedule()


class Exits(Provoked):
    def schedule(self) -> SchedulerOutput:
        if self.is_provoked:
            sys.exit(3)
        return super().schedule()


class ReturnsNothing(Provoked):
    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        return None if self.is_provoked else output  # type: ignore[return-value]


class ReturnsAnOldStep(Provoked):
    old: SchedulerOutput | None = None

    def schedule(self) -> SchedulerOutput:
        if self.is_provoked and self.old is not None:
            return self.old
        self.old = super().schedule()
        return self.old


class ForgetsAStep(Provoked):
    def schedule(self) -> SchedulerOutput:
        if self.is_provoked:
            self.new_step()
        return super().schedule()


class FreezesTwice(Provoked):
    def schedule(self) -> SchedulerOutput:
        if not self.is_provoked:
            return super().schedule()
        step = self.new_step()
        for request in self.waiting:
            step.admit(request)
        step.output()
        return step.output()


class RaisesInUpdate(Provoked):
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self.is_provoked:
            raise ValueError("no idea")
        return super().update_from_output(scheduler_output, model_runner_output)


class RaisesWhileTold(ChunkedPrefillScheduler):
    """Raises in every `schedule()`, whoever waits or does not, for as long as it is told to."""

    is_told: ClassVar[bool] = False
    num_calls: ClassVar[int] = 0

    def schedule(self) -> SchedulerOutput:
        RaisesWhileTold.num_calls += 1
        if self.is_told:
            raise ValueError("no idea")
        return super().schedule()


class NeverSchedules(Provoked):
    def schedule(self) -> SchedulerOutput:
        return self.new_step().output() if self.is_provoked else super().schedule()


async def generate(engine: AsyncEngine, prompt: list[int]) -> int:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    return sum([len(o.token_ids) async for o in engine.generate(prompt, params)])


def run(
    policy: type[ChunkedPrefillScheduler],
    main: Callable[[AsyncEngine], Any],
    monkeypatch: pytest.MonkeyPatch,
    cache: CacheConfig | None = None,
    **limits: Any,
) -> Any:
    """On the virtual clock, with `policy` in place of a name."""
    monkeypatch.setattr(builder, "load_policy", lambda spec: policy)
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(**limits),
        cache=cache or CacheConfig(),
    )

    async def with_engine() -> Any:
        async with AsyncEngine(config) as engine:
            return await main(engine)

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return runner.run(with_engine())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (RaisesMidway, r"RaisesMidway raised ValueError\('no idea'\) in schedule"),
        (ReturnsNothing, r"ReturnsNothing: schedule\(\) must return the output.*got None"),
        (FreezesTwice, r"FreezesTwice: output\(\) was called twice"),
        (RaisesInUpdate, r"RaisesInUpdate raised ValueError\('no idea'\) in update_from_output"),
        (NeverSchedules, r"NeverSchedules has scheduled no request for 7 s although 1 wait"),
    ],
)
def test_the_error_names_the_policy_and_the_rule_and_the_engine_goes_on(
    policy: type[Provoked], message: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(engine: AsyncEngine) -> None:
        assert await generate(engine, [1] * 20) == 5
        with pytest.raises(RequestFailedError, match=message):
            await generate(engine, [BAD] * 20)
        for length in (3, 40):
            assert await generate(engine, [2] * length) == 5
        stats = stats_of(engine)
        assert stats.num_waiting_reqs == stats.num_running_reqs == 0
        await asyncio.sleep(1)
        stats = stats_of(engine)
        assert stats.num_used_kv_blocks == 0

    run(policy, main, monkeypatch, pipeline_depth=depth, stall_timeout=7.0)


@pytest.mark.parametrize("depth", mostly_slow([1, 2], but=[2]))
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (RaisesFirst, r"RaisesFirst raised ValueError\('no idea'\) in schedule"),
        (ReturnsAnOldStep, r"ReturnsAnOldStep: schedule\(\) must return the output\(\) of a new"),
        (ForgetsAStep, r"ForgetsAStep: a new step was begun, but output\(\)"),
        (Cancels, r"Cancels raised CancelledError\(\) in schedule"),
        (Exits, r"Exits raised SystemExit\(3\) in schedule"),
        (Provoked, ""),
    ],
)
def test_a_policy_that_fails_over_no_request_gives_way_and_every_request_is_served(
    policy: type[Provoked],
    message: str,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(engine: AsyncEngine) -> None:
        assert await generate(engine, [1] * 20) == 5
        prompts = [[2] * 30, [BAD] * 20, *([first] * 20 for first in range(20, 320))]
        assert set(await asyncio.gather(*(generate(engine, prompt) for prompt in prompts))) == {5}
        health = await engine.ask(HealthCheck())
        assert health.status == "ready"
        assert engine.errored is None
        assert re.search(message, str(engine.replaced_policy_error or ""))
        metrics = engine.metrics.render().decode()
        assert f"aioserve_policy_replaced {float(bool(message))}" in metrics
        assert ("plans in the place of" in health.reason) is bool(message)
        # Chosen anew, it plans again, until it fails again.
        engine.switch_policy("fcfs")
        assert engine.replaced_policy_error is None
        assert (await engine.ask(HealthCheck())).reason == ""
        assert await generate(engine, [BAD] * 20) == 5

    run(policy, main, monkeypatch, pipeline_depth=depth)
    assert caplog.text.count("a plain policy, first come first served") == bool(message)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_policy_that_raises_once_over_a_result_fails_that_step_and_leaks_nothing(
    is_full: bool, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RaisesOnceAfterwards(ChunkedPrefillScheduler):
        has_raised = False

        def update_from_output(
            self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
        ) -> dict[int, EngineCoreOutputs]:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            ended = [o for outs in outputs.values() for o in outs.outputs if o.finish_reason]
            if ended and not self.has_raised:
                self.has_raised = True
                raise ValueError("no idea")
            return outputs

    async def main(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        streams = [await engine.add_request([i] * 20, params, request_id=f"r{i}") for i in range(3)]
        received: list[RequestOutput] = []

        async def read(stream: RequestStream) -> None:
            async for output in stream:
                received.append(output)

        for stream in streams:
            with pytest.raises(RequestFailedError, match="RaisesOnceAfterwards raised ValueError"):
                await read(stream)
        # The last token of each was that step's.
        assert sum(len(output.token_ids) for output in received) == 3 * 4
        assert not engine.abort_now("r1")
        for i in range(3):  # the ids are free again, and so are the blocks
            stream = await engine.add_request([i] * 20, params, request_id=f"r{i}")
            assert sum([len(output.token_ids) async for output in stream]) == 5
        await asyncio.sleep(1)
        stats = stats_of(engine)
        assert stats.num_used_kv_blocks == stats.num_running_reqs == stats.num_waiting_reqs == 0

    cache = CacheConfig(num_kv_blocks=6 if is_full else 100, watermark=0.0)
    run(RaisesOnceAfterwards, main, monkeypatch, cache=cache, pipeline_depth=depth)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_policy_that_ends_requests_while_it_plans_leaves_no_client_waiting(
    is_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndsRequests(Provoked):
        def schedule(self) -> SchedulerOutput:
            ids = [r.request_id for r in self.waiting if r.token_ids[0] == BAD]
            if is_inside and ids:
                self.new_step()
            if ids:
                self.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            return super().schedule()

    async def main(engine: AsyncEngine) -> None:
        async with asyncio.timeout(PATIENCE):
            if is_inside:  # refused, so that it has no effect
                assert await generate(engine, [BAD] * 20) == 5
                message = r"finish_requests\(\) was called while a step is under construction"
                assert re.search(message, str(engine.replaced_policy_error))
            else:
                with pytest.raises(RequestFailedError, match=r"schedule\(\) has ended 1 requests"):
                    await generate(engine, [BAD] * 20)
            assert await generate(engine, [1] * 20) == 5

    run(EndsRequests, main, monkeypatch)


@pytest.mark.parametrize("depth", [1, 2])
def test_others_that_run_meanwhile_get_all_their_tokens_or_an_error(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(engine: AsyncEngine) -> None:
        async def late_and_bad() -> int:
            await asyncio.sleep(0.012)
            return await generate(engine, [BAD] * 20)

        *good, bad = await asyncio.gather(
            *(generate(engine, [i] * 30) for i in range(3)),
            late_and_bad(),
            return_exceptions=True,
        )
        assert isinstance(bad, RequestFailedError)
        assert all(result == 5 or isinstance(result, RequestFailedError) for result in good)
        assert await generate(engine, [1] * 9) == 5

    run(RaisesMidway, main, monkeypatch, pipeline_depth=depth)


@pytest.mark.parametrize("error", [ValueError("no idea"), asyncio.CancelledError()])
def test_a_policy_that_raises_in_order_refuses_that_request_alone_and_gives_way_the_next_time(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RaisesInOrder(Provoked):
        def order(self, request: Request) -> float:
            if request.token_ids[0] == BAD:
                raise error
            return request.arrival_time

    async def main(engine: AsyncEngine) -> None:
        kind = type(error).__name__
        for _ in range(3):  # a step in between that works: it has not failed in a row
            with pytest.raises(PolicyError, match=rf"RaisesInOrder raised {kind}.* in order\(\)"):
                await generate(engine, [BAD] * 20)
            assert await generate(engine, [1] * 9) == 5
        with pytest.raises(PolicyError, match=r"RaisesInOrder raised"):
            await generate(engine, [BAD] * 20)
        assert await generate(engine, [BAD] * 20) == 5
        assert isinstance(engine.replaced_policy_error, PolicyError)

    run(RaisesInOrder, main, monkeypatch)


def test_a_request_past_its_deadline_ends_with_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        loop = asyncio.get_running_loop()
        began = loop.time()
        outputs = [o async for o in engine.generate([1] * 9, params, timeout=0.5)]
        assert outputs[-1].finish_reason is FinishReason.TIMEOUT
        assert 0.5 <= loop.time() - began < 0.52
        assert 50 < outputs[-1].num_output_tokens < 1000

    run(Provoked, main, monkeypatch)


def test_a_request_that_waits_too_long_ends_with_timeout_and_one_that_runs_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)

        async def reason(prompt: list[int]) -> FinishReason | None:
            return [o.finish_reason async for o in engine.generate(prompt, params)][-1]

        reasons = await asyncio.gather(*(reason([i] * 9) for i in range(3)))
        assert reasons == [FinishReason.LENGTH, FinishReason.TIMEOUT, FinishReason.TIMEOUT]

    run(Provoked, main, monkeypatch, max_num_seqs=1, queue_timeout=0.3)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether `RaisesWhileTold` raises from here on."""
    monkeypatch.setattr(RaisesWhileTold, "num_calls", 0)
    monkeypatch.setattr(RaisesWhileTold, "is_told", False)
    return lambda is_told: monkeypatch.setattr(RaisesWhileTold, "is_told", is_told)


@pytest.mark.parametrize("depth", mostly_slow([1, 2], but=[2]))
@pytest.mark.parametrize("has_run", [False, True])
async def test_a_policy_that_raises_for_ever_is_asked_no_more_until_it_is_switched(
    has_run: bool, depth: int, monkeypatch: pytest.MonkeyPatch, told: Callable[[bool], None]
) -> None:
    monkeypatch.setattr(builder, "load_policy", lambda spec: RaisesWhileTold)
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated", step_base_ms=0.5),
        scheduler=SchedulerConfig(pipeline_depth=depth),
    )
    num_ticks = 0

    async def tick() -> None:
        nonlocal num_ticks
        while True:
            num_ticks += 1
            await asyncio.sleep(0)

    async with AsyncEngine(config) as engine, asyncio.timeout(PATIENCE):
        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        told(not has_run)
        stream = await engine.add_request([1] * 20, endless)
        if has_run:
            await anext(stream)
            told(True)
        ticker = asyncio.create_task(tick())
        num_tokens = sum([len(output.token_ids) async for output in stream])
        assert num_tokens == 400 - has_run
        for _ in range(3):
            before = num_ticks
            assert await generate(engine, [2] * 20) == 5
            assert num_ticks > before
        assert "no idea" in str(engine.replaced_policy_error)
        assert engine.metrics.render().count(b"aioserve_policy_failures_total 2.0") == 1
        ticker.cancel()
        engine.switch_policy("fcfs")
        assert engine.policy_error is engine.replaced_policy_error is None
        assert await generate(engine, [3] * 20) == 5


def test_a_policy_that_has_failed_once_counts_as_failing_until_a_step_or_ten_quiet_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(engine: AsyncEngine) -> None:
        for seconds, is_failing in ((9, True), (11, False)):
            with pytest.raises(RequestFailedError):
                await generate(engine, [BAD] * 20)
            await asyncio.sleep(seconds)
            assert (engine.policy_error is not None) is is_failing
            assert ((await engine.ask(HealthCheck())).status == "failing") is is_failing
            assert await generate(engine, [2] * 20) == 5
            assert engine.policy_error is None
        assert engine.replaced_policy_error is None

    run(RaisesMidway, main, monkeypatch)


def test_a_policy_outside_base_scheduler_that_raises_for_ever_ends_its_requests(
    monkeypatch: pytest.MonkeyPatch, told: Callable[[bool], None]
) -> None:
    monkeypatch.setattr(RaisesWhileTold, "switch", SchedulerInterface.switch)

    async def main(engine: AsyncEngine) -> None:
        told(True)
        for _ in range(3):
            with pytest.raises(RequestFailedError, match="RaisesWhileTold raised ValueError"):
                await generate(engine, [1] * 20)
        num_calls = RaisesWhileTold.num_calls
        await asyncio.sleep(9)
        assert RaisesWhileTold.num_calls == num_calls  # no request is there to ask for
        told(False)
        assert await generate(engine, [2] * 20) == 5
        assert engine.policy_error is None

    run(RaisesWhileTold, main, monkeypatch)


def test_a_policy_that_fails_often_is_logged_once_a_second_with_a_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]

    async def main(engine: AsyncEngine) -> None:
        one = SamplingParams(max_tokens=1)
        for _ in range(10):
            with pytest.raises(RequestFailedError):
                await generate(engine, [BAD] * 20)
            [output async for output in engine.generate([1] * 9, one)]
        assert len(lines()) == 1
        await asyncio.sleep(1)
        with pytest.raises(RequestFailedError):
            await generate(engine, [BAD] * 20)
        assert len(lines()) == 2
        assert "(9 more were not logged)" in lines()[1]
        assert b"aioserve_policy_failures_total 11.0" in engine.metrics.render()

    run(RaisesMidway, main, monkeypatch)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_client_of_a_policy_that_raises_at_random_hears_something(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(depth)

    class RaisesAtRandom(ChunkedPrefillScheduler):
        num_good = 0  # since it raised: in a row, it would give way

        def schedule(self) -> SchedulerOutput:
            self.num_good += 1
            if dice.random() < 0.05 and self.num_good > 3:
                self.num_good = 0
                raise ValueError("no idea")
            output = super().schedule()
            if dice.random() < 0.05 and self.num_good > 3:
                self.num_good = 0
                raise ValueError("on second thoughts")
            return output

    async def main(engine: AsyncEngine) -> None:
        async def late(i: int) -> int:
            await asyncio.sleep(0.004 * i)
            return await generate(engine, [i] * (i % 50 + 1))

        results = await asyncio.gather(*(late(i) for i in range(300)), return_exceptions=True)
        assert {r for r in results if not isinstance(r, RequestFailedError)} == {5}
        assert 10 < sum(isinstance(r, RequestFailedError) for r in results) < 290
        assert engine.replaced_policy_error is None

    run(RaisesAtRandom, main, monkeypatch, pipeline_depth=depth)
