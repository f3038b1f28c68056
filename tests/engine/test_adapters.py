"""Who waits for an adapter, for how long, and what is left when he has gone; without a model."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import AdapterConfig, ModelConfig, RunnerConfig
from aioserve.errors import EngineDeadError, RequestTimeoutError, UnknownModelError
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import FinishReason, ModelRunnerOutput
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler.output import SchedulerOutput
from tests.kit import stats_of
from tests.processes import PATIENCE

if TYPE_CHECKING:
    from aioserve.features.lora.peft_directory import AdapterFiles

SHORT = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True, detokenize=False)


class GatedRunner(SimulatedRunner):
    """Takes adapters while its gate is open. Notes who is to run with one that it does not have."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, ModelInfo(config.model))
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[str] = []  # names
        self.loaded: set[str] = set()
        self.missed: list[str] = []

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
        self.asked.append(adapter_id.partition("@")[0])
        await self.gate.wait()
        self.loaded.add(adapter_id)

    def unload_adapter(self, adapter_id: str) -> None:
        self.loaded.remove(adapter_id)

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        new = {data.adapter_id for data in scheduler_output.scheduled_new_reqs} - {""}
        self.missed += new - self.loaded
        return super().execute_model(scheduler_output)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import torch
    from safetensors.torch import save_file

    found = {}
    for seed, name in enumerate(("a", "b", "c")):
        path = found[name] = tmp_path_factory.mktemp(name)
        part = torch.full((1, 1), float(seed))
        names = [f"base_model.model.layer.lora_{side}.weight" for side in "AB"]
        save_file({key: part.clone() for key in names}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    return found


def make_engine(paths: dict[str, Path], *, max_cpu_loras: int = 1) -> tuple[AsyncEngine, Any]:
    lora = tuple(f"{name}={path}" for name, path in paths.items())
    config = EngineConfig(
        model=ModelConfig(skip_tokenizer_init=True),
        adapters=AdapterConfig(lora=lora, max_cpu_loras=max_cpu_loras),
        runner=RunnerConfig(runner="simulated", step_base_ms=1.0),
    )
    runner = GatedRunner(config)
    return AsyncEngine(config, runner=runner), runner


async def say(engine: AsyncEngine, name: str, **more: Any) -> FinishReason | None:
    said = [output async for output in engine.generate([5, 6, 7], SHORT, adapter=name, **more)]
    return said[-1].finish_reason


async def until(is_so: Any) -> None:
    """Let others go on until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110 - of several things
            await asyncio.sleep(0.001)


async def let_others_wait() -> None:
    """Tasks come as far as they can without time."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_nobody_runs_before_the_runner_has_his_adapter(paths: dict[str, Path]) -> None:
    engine, runner = make_engine(paths)
    async with engine:
        runner.gate.clear()
        first = asyncio.create_task(say(engine, "a"))
        await until(lambda: runner.asked[-1] == "a")
        second = asyncio.create_task(say(engine, "a"))
        await let_others_wait()
        runner.gate.set()
        assert [await first, await second] == [FinishReason.LENGTH] * 2
        assert runner.missed == []
        assert runner.asked == [*"abc", "a"]


async def test_an_adapter_comes_though_all_who_asked_for_it_had_no_more_time(
    paths: dict[str, Path],
) -> None:
    engine, runner = make_engine(paths)
    async with engine:
        runner.gate.clear()
        asking = asyncio.create_task(say(engine, "a"))
        await until(lambda: runner.asked[-1] == "a")
        with pytest.raises(RequestTimeoutError, match="'a' was not loaded within"):
            await say(engine, "a", timeout=0.001)
        asking.cancel()
        await asyncio.wait([asking])
        runner.gate.set()
        assert await say(engine, "a", timeout=30) is FinishReason.LENGTH
        assert runner.asked == [*"abc", "a"]  # not another time
        assert await say(engine, "b") is FinishReason.LENGTH  # it had no user left
        assert len(runner.loaded) == engine.metrics.adapters.num_resident == 1


async def test_another_can_be_loaded_while_somebody_waits_for_a_place(
    paths: dict[str, Path],
) -> None:
    engine, runner = make_engine({name: paths[name] for name in "ab"})
    async with engine:
        stream = await engine.add_request([5, 6, 7], ENDLESS, adapter="a")
        waiting = asyncio.create_task(say(engine, "b"))
        await let_others_wait()
        async with asyncio.timeout(PATIENCE):
            await engine.adapters.load("c", str(paths["c"]))
        assert not waiting.done()
        assert len(runner.loaded) == 1  # it was checked, and has no place yet
        stream.close()
        assert await waiting is FinishReason.LENGTH
        assert await say(engine, "c") is FinishReason.LENGTH


async def test_what_was_loaded_last_was_used_last(paths: dict[str, Path]) -> None:
    engine, runner = make_engine(paths, max_cpu_loras=2)
    async with engine:
        assert {name.partition("@")[0] for name in runner.loaded} == {"b", "c"}


@pytest.mark.parametrize("is_being_read", [False, True])
async def test_who_is_aborted_waits_for_no_adapter(
    is_being_read: bool, paths: dict[str, Path]
) -> None:
    engine, runner = make_engine(paths)
    async with engine:
        stream = await engine.add_request([5, 6, 7], ENDLESS, adapter="a")
        if is_being_read:
            stream.close()
            runner.gate.clear()
        waiting = asyncio.create_task(say(engine, "b", request_id="r"))
        await until(lambda: not is_being_read or runner.asked[-1] == "b")
        await let_others_wait()
        assert engine.abort_now("r")
        assert engine.abort_now("r")
        assert await waiting is FinishReason.ABORT
        stream.close()
        runner.gate.set()
        assert await say(engine, "b", request_id="r") is FinishReason.LENGTH
        assert await say(engine, "c") is FinishReason.LENGTH
        assert runner.missed == []


@pytest.mark.parametrize("is_being_read", [False, True])
async def test_who_waits_for_an_adapter_hears_of_the_end(
    is_being_read: bool, paths: dict[str, Path]
) -> None:
    engine, runner = make_engine({name: paths[name] for name in "ab"})
    await engine.start()
    stream = await engine.add_request([5, 6, 7], ENDLESS, adapter="a")
    if is_being_read:
        stream.close()
        runner.gate.clear()
    waiting = [asyncio.create_task(say(engine, "b")) for _ in range(2)]
    await until(lambda: not is_being_read or runner.asked[-1] == "b")
    await let_others_wait()
    shutdown = asyncio.create_task(engine.shutdown())
    await let_others_wait()
    runner.gate.set()
    for task in waiting:
        with pytest.raises(EngineDeadError, match="is shutting down"):
            await task
    await shutdown
    assert runner.asked.count("b") == 1 + is_being_read  # nothing is read for nobody
    with pytest.raises(EngineDeadError, match="is shutting down"):
        await engine.adapters.load("c", str(paths["c"]))


async def test_who_waits_for_a_place_for_what_is_unloaded_waits_no_more(
    paths: dict[str, Path],
) -> None:
    engine, _ = make_engine({name: paths[name] for name in "ab"})
    async with engine:
        stream = await engine.add_request([5, 6, 7], ENDLESS, adapter="a")
        waiting = asyncio.create_task(say(engine, "b"))
        await let_others_wait()
        engine.adapters.unload("b")
        with pytest.raises(UnknownModelError, match="'b' does not exist"):
            await waiting
        stats = stats_of(engine)
        assert stats.num_running_reqs == 1  # that was not why
        stream.close()
        assert await say(engine, "a") is FinishReason.LENGTH


async def test_metrics_have_no_more_names_than_there_are_adapters(paths: dict[str, Path]) -> None:
    engine, _ = make_engine({"a": paths["a"]})
    async with engine:
        for number in range(20):
            await engine.adapters.load(f"n{number}", str(paths["b"]))
            await say(engine, f"n{number}")
            engine.adapters.unload(f"n{number}")
        await say(engine, "a")
        told = engine.metrics.render().decode().splitlines()
    lines = [line for line in told if line.startswith("aioserve_requests_by_adapter_total")]
    assert lines == ['aioserve_requests_by_adapter_total{adapter="a"} 1.0']
