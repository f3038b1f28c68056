"""A policy may do anything: its requests get an error that names it, and the engine goes on."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.engine import async_engine
from aioserve.errors import PolicyError, RequestFailedError
from aioserve.lab import VirtualClockEventLoop
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.scheduler import Request, SchedulerOutput

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


class NeverSchedules(Provoked):
    def schedule(self) -> SchedulerOutput:
        return self.new_step().output() if self.is_provoked else super().schedule()


async def generate(engine: AsyncEngine, prompt: list[int]) -> int:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    return sum([len(o.token_ids) async for o in engine.generate(prompt, params)])


def run(
    policy: type[Provoked],
    main: Callable[[AsyncEngine], Any],
    monkeypatch: pytest.MonkeyPatch,
    **limits: Any,
) -> Any:
    """On the virtual clock, with `policy` in place of a name."""
    monkeypatch.setattr(async_engine, "load_policy", lambda spec: policy)
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"), scheduler=SchedulerConfig(**limits)
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
        (RaisesFirst, r"RaisesFirst raised ValueError\('no idea'\) in schedule"),
        (RaisesMidway, r"RaisesMidway raised ValueError\('no idea'\) in schedule"),
        (ReturnsNothing, r"ReturnsNothing: schedule\(\) must return the output.*got None"),
        (ReturnsAnOldStep, r"ReturnsAnOldStep: schedule\(\) must return the output\(\) of a new"),
        (ForgetsAStep, r"ForgetsAStep: a new step was begun, but output\(\)"),
        (FreezesTwice, r"FreezesTwice: output\(\) was called twice"),
        (RaisesInUpdate, r"RaisesInUpdate raised ValueError\('no idea'\) in update_from_output"),
        (NeverSchedules, r"NeverSchedules has scheduled nobody for 7 s although 1 requests wait"),
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
        assert engine._core is not None
        stats = engine._core.scheduler.make_stats()
        assert stats is not None
        assert stats.num_waiting_reqs == stats.num_running_reqs == 0
        await asyncio.sleep(1)
        stats = engine._core.scheduler.make_stats()
        assert stats is not None
        assert stats.num_used_kv_blocks == 0

    run(policy, main, monkeypatch, pipeline_depth=depth, stall_timeout=7.0)


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


def test_a_policy_that_raises_in_order_refuses_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class RaisesInOrder(Provoked):
        def order(self, request: Request) -> float:
            if request.token_ids[0] == BAD:
                raise ValueError("no idea")
            return request.arrival_time

    async def main(engine: AsyncEngine) -> None:
        with pytest.raises(PolicyError, match=r"RaisesInOrder raised ValueError.* in order\(\)"):
            await generate(engine, [BAD] * 20)
        assert await generate(engine, [1] * 9) == 5

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
