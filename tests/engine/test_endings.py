"""However a request ends, its reader has every token that came, and hears of the end in time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from aioserve.config import ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine import builder
from aioserve.errors import AioserveError
from aioserve.lab import VirtualClockEventLoop
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler import Request, SchedulerOutput
from tests.kit import stats_of
from tests.processes import PATIENCE

T = TypeVar("T")

SILENT = SamplingParams(max_tokens=1000, ignore_eos=True, detokenize=False)
FINAL_ONLY = msgspec.structs.replace(SILENT, output_kind="final_only")


def make_config(step_base_ms: float = 4.0, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(skip_tokenizer_init=True),
        runner=RunnerConfig(runner="simulated", step_base_ms=step_base_ms),
        scheduler=SchedulerConfig(**scheduler),
    )


def virtually(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return runner.run(main)


class Breakable(SimulatedRunner):
    """Fails in the step after it was told to."""

    is_broken = False

    def _compute(self, scheduler_output: SchedulerOutput) -> tuple[float, ModelRunnerOutput]:
        if self.is_broken and scheduler_output.num_scheduled_tokens:
            self.is_broken = False
            raise ValueError("a kernel failed")
        return super()._compute(scheduler_output)


class Moody(ChunkedPrefillScheduler):
    """Raises after it has planned a step, once it is told to."""

    mood = ""
    requests: ClassVar[dict[str, Request]] = {}  # that came, by id

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.requests[request.request_id] = request

    def schedule(self) -> SchedulerOutput:
        mood, Moody.mood = Moody.mood, ""
        output = super().schedule()
        if mood == "after":
            raise ValueError("on second thoughts")
        return output


async def read(stream: Any) -> tuple[list[int], FinishReason | None, int | None]:
    """Tokens, the finish reason (ERROR if it raised) and the engine's own count of the tokens."""
    token_ids: list[int] = []
    reason, count = None, None
    try:
        async for output in stream:
            token_ids += output.token_ids
            reason, count = output.finish_reason, output.num_output_tokens
    except AioserveError:
        reason = FinishReason.ERROR
    return token_ids, reason, count


@pytest.mark.parametrize("depth", [1, 2])
def test_a_deadline_takes_no_token_that_has_come(depth: int) -> None:
    async def main() -> None:
        async with AsyncEngine(make_config(pipeline_depth=depth)) as engine:
            for i in range(20):
                readers = [
                    read(await engine.add_request([5, 6, 7], params, timeout=0.04 + 0.0013 * i))
                    for params in (SILENT, FINAL_ONLY)
                ]
                deltas, final = await asyncio.gather(*readers)
                assert deltas == final
                assert deltas[1] is FinishReason.TIMEOUT
                assert len(deltas[0]) == deltas[2] > 5

    virtually(main())


async def end_by_abort(engine: AsyncEngine, runner: Breakable) -> None:
    assert engine.abort_now("a")


async def end_by_shutdown(engine: AsyncEngine, runner: Breakable) -> None:
    await engine.shutdown()


async def end_by_step(engine: AsyncEngine, runner: Breakable) -> None:
    runner.is_broken = True


async def end_after_planning(engine: AsyncEngine, runner: Breakable) -> None:
    Moody.mood = "after"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (end_by_abort, FinishReason.ABORT),
        (end_by_shutdown, FinishReason.ABORT),
        (end_by_step, FinishReason.ERROR),
        (end_after_planning, FinishReason.ERROR),
    ],
)
def test_an_end_from_outside_takes_no_token_that_has_come(
    end: Callable[[AsyncEngine, Breakable], Coroutine[Any, Any, None]],
    reason: FinishReason,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder, "load_policy", lambda spec: Moody)
    config = make_config(pipeline_depth=depth)

    async def main() -> None:
        runner = Breakable(config, ModelInfo(config.model))
        engine = AsyncEngine(config, runner=runner)
        async with engine:
            reader = asyncio.create_task(
                read(await engine.add_request([5, 6, 7], SILENT, request_id="a"))
            )
            request = Moody.requests["a"]
            await asyncio.sleep(0.0501)
            await end(engine, runner)
            token_ids, got, _ = await reader
            assert got is reason
            assert token_ids == request.output_token_ids
            assert len(token_ids) > 5

    virtually(main())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_deadline_is_heard_while_a_step_computes_and_the_blocks_return_with_it(
    depth: int,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        config = make_config(step_base_ms=1000, pipeline_depth=depth, max_num_seqs=1)
        async with AsyncEngine(config) as engine:
            running = await engine.add_request([5] * 40, SILENT, timeout=0.25)
            waiting = await engine.add_request([6] * 40, SILENT, timeout=0.125)
            for stream, seconds in ((waiting, 0.125), (running, 0.25)):
                assert (await read(stream))[1] is FinishReason.TIMEOUT
                assert loop.time() == pytest.approx(seconds, abs=0.002)
            assert stats_of(engine).num_running_reqs == stats_of(engine).num_waiting_reqs == 0
            assert stats_of(engine).num_used_kv_blocks == 3
            await asyncio.sleep(2)
            assert stats_of(engine).num_used_kv_blocks == 0

    virtually(main())


def test_a_queue_timeout_is_heard_while_a_step_computes() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        config = make_config(step_base_ms=1000, max_num_seqs=1, queue_timeout=0.4)
        async with AsyncEngine(config) as engine:
            running = await engine.add_request([5] * 40, SILENT)
            await asyncio.sleep(0.1)
            waiting = await engine.add_request([6] * 40, SILENT)
            assert (await read(waiting))[1] is FinishReason.TIMEOUT
            assert loop.time() == pytest.approx(0.5, abs=0.002)
            assert (await anext(running)).token_ids  # one that is served may take its time

    virtually(main())


class Held(SimulatedRunner):
    """A step is back when it is let go."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, ModelInfo(config.model))
        self.may_return = asyncio.Event()

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        _, output = self._compute(scheduler_output)

        async def wait() -> ModelRunnerOutput:
            await self.may_return.wait()
            return output

        return asyncio.ensure_future(wait())


async def test_a_deadline_passes_on_a_real_clock_while_a_step_is_held() -> None:
    config = make_config(queue_timeout=600.0)
    runner = Held(config)
    async with AsyncEngine(config, runner=runner) as engine, asyncio.timeout(PATIENCE):
        others = [await engine.add_request([i], SILENT, timeout=60.0) for i in range(3)]
        hurried = await engine.add_request([5, 6, 7], SILENT, timeout=0.01)
        assert (await read(hurried))[1] is FinishReason.TIMEOUT
        runner.may_return.set()
        for stream in others:
            assert (await anext(stream)).token_ids


def test_abort_ends_all_samples_of_a_request_and_no_other() -> None:
    async def main() -> None:
        async with AsyncEngine(make_config()) as engine:
            samples = msgspec.structs.replace(SILENT, n=3)
            stream = await engine.add_request([5, 6], samples, request_id="a")
            other = await engine.add_request([5, 6], SILENT, request_id="b")
            await anext(stream)
            assert engine.abort_now("a")
            reasons = {o.index: o.finish_reason async for o in stream}
            assert reasons == dict.fromkeys(range(3), FinishReason.ABORT)
            assert not engine.abort_now("a")  # it has ended
            assert not engine.abort_now("b-0")  # nobody's
            for _ in range(5):
                assert not (await anext(other)).finished
            other.close()
            assert not engine.abort_now("b")
        assert not engine.abort_now("b")

    virtually(main())
