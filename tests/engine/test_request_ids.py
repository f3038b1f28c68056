"""An id belongs to one request until that has ended, and so do the ids of its samples."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig, FinishReason, SamplingParams
from aioserve.config import ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine.stream import RequestStream
from aioserve.errors import EngineOverloadedError, RequestFailedError, RequestIdInUseError
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler import SchedulerOutput
from tests.kit import case
from tests.processes import PATIENCE
from tests.tokenizing import hold_tokenizing

CONFIG = EngineConfig(
    model=ModelConfig(skip_tokenizer_init=True),
    runner=RunnerConfig(runner="simulated", step_base_ms=0.2, simulated_output_tokens=20),
)
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True, detokenize=False)
SAMPLES = msgspec.structs.replace(ENDLESS, n=2)
SHORT = msgspec.structs.replace(ENDLESS, max_tokens=3)
LONGER = msgspec.structs.replace(ENDLESS, max_tokens=50)


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(CONFIG) as engine:
        yield engine


async def add(engine: AsyncEngine, request_id: str, params: SamplingParams) -> RequestStream:
    return await engine.add_request([5, 6, 7], params, request_id=request_id)


async def tokens(stream: RequestStream) -> list[int]:
    return [token_id async for output in stream for token_id in output.token_ids]


CLASHES = [
    ("x", ENDLESS, "x", ENDLESS),
    ("x", SAMPLES, "x", ENDLESS),
    ("x", SAMPLES, "x-0", ENDLESS),
    ("x", SAMPLES, "x-1", SAMPLES),
    ("x-1", ENDLESS, "x", SAMPLES),
    ("x", ENDLESS, "x", SAMPLES),
]


async def test_an_id_in_use_is_refused_and_nobody_is_harmed(engine: AsyncEngine) -> None:
    for first, params, second, second_params in CLASHES:
        with case(f"{first}, n={params.n}", f"{second}, n={second_params.n}"):
            stream = await add(engine, first, params)
            await anext(stream)
            with pytest.raises(RequestIdInUseError, match="is in use") as caught:
                await add(engine, second, second_params)
            assert caught.value.param == "request_id"
            assert not (await anext(stream)).finished
            stream.close()
            assert len(await tokens(await add(engine, second, SHORT))) == 3


async def test_the_id_of_a_sample_that_has_ended_is_its_requests_until_all_have(
    engine: AsyncEngine,
) -> None:
    stream = await add(engine, "x", SAMPLES)
    await anext(stream)
    engine.internals.end_stopped({"x-0": 1})  # as if by a stop string
    with pytest.raises(RequestIdInUseError):
        await add(engine, "x-0", ENDLESS)
    stream.close()
    other = await add(engine, "x-0", ENDLESS)
    stream.close()
    assert not (await anext(other)).finished


async def test_a_stream_that_is_closed_late_leaves_the_next_owner_of_its_ids_alone(
    engine: AsyncEngine,
) -> None:
    old = await add(engine, "x", msgspec.structs.replace(SHORT, n=2))
    assert len(await tokens(old)) == 6
    new = await add(engine, "x-0", SHORT)
    old.close()
    assert len(await tokens(new)) == 3


@pytest.mark.parametrize("depth", [1, 2])
async def test_an_id_can_be_had_again_at_once_even_with_a_step_in_flight(depth: int) -> None:
    scheduler = SchedulerConfig(pipeline_depth=depth)
    async with AsyncEngine(msgspec.structs.replace(CONFIG, scheduler=scheduler)) as engine:
        expected = await tokens(
            await add(engine, "y", msgspec.structs.replace(SHORT, max_tokens=50))
        )
        for _ in range(8):
            stream = await add(engine, "x", ENDLESS)
            await anext(stream)
            assert engine.abort_now("x")
            assert await tokens(await add(engine, "x", LONGER)) == expected


async def test_a_refused_request_leaves_its_id_free() -> None:
    scheduler = SchedulerConfig(max_waiting_requests=1)
    async with AsyncEngine(msgspec.structs.replace(CONFIG, scheduler=scheduler)) as engine:
        with pytest.raises(EngineOverloadedError):
            await add(engine, "x", msgspec.structs.replace(SHORT, n=3))
        assert len(await tokens(await add(engine, "x", SHORT))) == 3


class FailsOne(SimulatedRunner):
    """One sample of each request cannot go on, once this is told so."""

    is_told = False

    def _compute(self, scheduler_output: SchedulerOutput) -> tuple[float, ModelRunnerOutput]:
        seconds, output = super()._compute(scheduler_output)
        if self.is_told and "x-0" in output.req_ids:
            output = msgspec.structs.replace(output, failed={"x-0": "its step"})
        return seconds, output


async def test_when_one_sample_fails_closing_the_stream_ends_the_others() -> None:
    runner = FailsOne(CONFIG, ModelInfo(CONFIG.model))
    async with AsyncEngine(CONFIG, runner=runner) as engine:
        async with await add(engine, "x", SAMPLES) as stream:
            await anext(stream)
            runner.is_told = True
            with pytest.raises(RequestFailedError, match="its step"):
                await tokens(stream)
        await asyncio.sleep(0)
        snapshot = engine.inspect()
        assert snapshot is not None
        assert snapshot.reader_ids == []
        assert len(await tokens(await add(engine, "x", SHORT))) == 3


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_is_being_tokenized_can_be_aborted_and_its_id_is_taken(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(CONFIG, model=ModelConfig())
    text, params = "Who's there?", SamplingParams(n=n, max_tokens=50)
    async with AsyncEngine(config) as engine, asyncio.timeout(PATIENCE):
        may_go_on = hold_tokenizing(monkeypatch)
        adding = asyncio.create_task(engine.add_request(text, params, request_id="x"))
        await asyncio.sleep(0)
        with pytest.raises(RequestIdInUseError):
            await engine.add_request("short", params, request_id="x")
        assert engine.abort_now("x")
        assert not adding.done()
        may_go_on.set()
        outputs = [output async for output in await adding]
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT] * n
        assert not any(output.token_ids for output in outputs)
        assert not engine.abort_now("x")
        (await engine.add_request("short", params, request_id="x")).close()
