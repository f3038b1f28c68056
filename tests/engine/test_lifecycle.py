"""An engine is started once and ended once, in whatever order the calls come."""

import asyncio
import gc
import itertools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.engine.operations import HealthCheck
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    EngineStartError,
    ForeignLoopError,
    RunnerDeadError,
)
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs
from aioserve.runner.interface import RunnerInfo
from aioserve.runner.simulated import SimulatedRunner
from tests.processes import PATIENCE, until
from tests.slow import mostly_slow

CONFIG = EngineConfig(runner=RunnerConfig(runner="simulated", step_base_ms=0.5))
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def threads_beside(before: set[threading.Thread]) -> list[str]:
    """Names of our threads that live, without those of `before`."""
    return [t.name for t in set(threading.enumerate()) - before if t.name.startswith("aioserve")]


async def use(config: EngineConfig) -> AsyncEngine:
    """An engine that has started, and all threads that a reply takes."""
    engine = AsyncEngine(config)
    await engine.start()
    schema = StructuredOutputs(json={"type": "integer"})
    is_real = config.runner.runner != "simulated"
    params = SamplingParams(max_tokens=3, structured_outputs=schema if is_real else None)
    async for _ in engine.generate([{"role": "user", "content": "x"}], params):
        pass
    return engine


@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize(
    ("runner", "turns_on"),
    mostly_slow(
        itertools.product(["simulated", "model"], [True, False]),
        but=[("simulated", False), ("model", True), ("model", False)],
    ),
)
def test_an_engine_that_is_dropped_without_shutdown_leaves_no_thread_and_no_process(
    runner: Any, turns_on: bool, tmp_path: Path
) -> None:
    logs = SchedulerConfig(
        request_log=str(tmp_path / "requests.jsonl"), decision_log=str(tmp_path / "decisions.log")
    )
    config = EngineConfig(runner=RunnerConfig(runner=runner), scheduler=logs)
    before, processes = set(threading.enumerate()), set(psutil.Process().children())

    def all_have_ended() -> bool:
        gc.collect()
        children = set(psutil.Process().children()) - processes
        return not (threads_beside(before) or children)

    async def drop() -> None:
        """In a loop that turns on, of which Python warns."""
        engine = await use(config)
        what = f"{engine!r} is dropped without shutdown()"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ResourceWarning)
            del engine
            async with asyncio.timeout(PATIENCE):
                while not all_have_ended():  # noqa: ASYNC110 - threads end
                    await asyncio.sleep(0.01)
        assert [str(one.message) for one in told if "dropped" in str(one.message)] == [what]

    if turns_on:
        asyncio.run(drop())
    else:
        engine = asyncio.run(use(config))
        assert len(threads_beside(before)) >= 4
        del engine
        until(all_have_ended, "its threads end")


class SlowToLoad(SimulatedRunner):
    """Loads when it is told to; counts how often it was closed."""

    def __init__(self) -> None:
        super().__init__(CONFIG, ModelInfo(CONFIG.model))
        self.may_load = asyncio.Event()
        self.num_loads = self.num_closes = 0

    async def load(self) -> RunnerInfo:
        self.num_loads += 1
        await self.may_load.wait()
        return self.info

    async def close(self) -> None:
        self.num_closes += 1
        await super().close()


def engine_tasks() -> list[str]:
    return [t.get_name() for t in asyncio.all_tasks() if t.get_name() == "aioserve-engine"]


async def count_tokens(engine: AsyncEngine) -> int:
    return sum([len(o.token_ids) async for o in engine.generate([5, 6, 7], SHORT)])


def test_an_engine_whose_loop_has_ended_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = AsyncEngine(CONFIG)
    asyncio.run(engine.start())
    assert "the engine has died" in caplog.text

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(EngineDeadError, match="the end of the event loop that the engine"):
                await count_tokens(engine)
            assert not engine.abort_now("a")
            with pytest.raises(EngineDeadError):
                await engine.wait_ended()
            await engine.shutdown()

    asyncio.run(main())


async def test_an_engine_task_that_is_cancelled_from_outside_tells_every_stream() -> None:
    async with AsyncEngine(CONFIG) as engine:
        stream = await engine.add_request([5], SamplingParams(max_tokens=10_000, ignore_eos=True))
        await anext(stream)
        (task,) = (t for t in asyncio.all_tasks() if t.get_name() == "aioserve-engine")
        task.cancel()
        with pytest.raises(EngineDeadError, match="the engine task was cancelled"):
            [output async for output in stream]
        with pytest.raises(EngineDeadError, match="the engine task was cancelled"):
            await engine.wait_ended()
        assert (await engine.ask(HealthCheck())).status == "dead"


async def test_a_call_from_another_thread_is_refused_in_words_and_can_be_handed_over() -> None:
    async with AsyncEngine(CONFIG) as engine:
        loop = asyncio.get_running_loop()
        here = "another thread than the one that it was started in.*run_coroutine_threadsafe"

        def elsewhere() -> int:
            for call in (lambda: count_tokens(engine), lambda: engine.pause()):
                with pytest.raises(ForeignLoopError, match=here):
                    asyncio.run(call())
            with pytest.raises(ForeignLoopError, match=here):
                engine.abort_now("a")
            return asyncio.run_coroutine_threadsafe(count_tokens(engine), loop).result(PATIENCE)

        assert await asyncio.to_thread(elsewhere) == 3
        assert await count_tokens(engine) == 3


async def test_a_second_start_is_refused_and_the_engine_goes_on() -> None:
    async with AsyncEngine(CONFIG) as engine:
        with pytest.raises(EngineStartError, match=r"start\(\) was called before"):
            await engine.start()
        with pytest.raises(EngineStartError, match=r"start\(\) was called before"):
            async with engine:
                pass
        assert len(engine_tasks()) == 1
        assert await count_tokens(engine) == 3
    assert not engine_tasks()


async def test_of_two_starts_at_once_one_is_refused() -> None:
    runner = SlowToLoad()
    engine = AsyncEngine(CONFIG, runner=runner)
    first = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    with pytest.raises(EngineStartError):
        await engine.start()
    runner.may_load.set()
    await first
    assert (runner.num_loads, len(engine_tasks())) == (1, 1)
    assert await count_tokens(engine) == 3
    await engine.shutdown()


@pytest.mark.parametrize("was_started", [False, True])
async def test_a_start_after_shutdown_is_refused(was_started: bool) -> None:
    engine = AsyncEngine(CONFIG)
    if was_started:
        await engine.start()
    await engine.shutdown()
    with pytest.raises(EngineStartError, match=r"after shutdown\(\)"):
        await engine.start()
    assert not engine_tasks()


async def test_a_start_after_one_that_failed_is_refused() -> None:
    class Unloadable(SlowToLoad):
        async def load(self) -> RunnerInfo:
            raise ConfigError("no weights")

    runner = Unloadable()
    engine = AsyncEngine(CONFIG, runner=runner)
    with pytest.raises(ConfigError, match="no weights"):
        await engine.start()
    assert runner.num_closes == 1
    with pytest.raises(EngineStartError, match=r"start\(\) was called before"):
        await engine.start()
    with pytest.raises(EngineDeadError, match="not been started"):
        await engine.add_request([5], SHORT)
    await engine.shutdown()


async def test_a_shutdown_ends_a_start_that_goes_on() -> None:
    runner = SlowToLoad()
    engine = AsyncEngine(CONFIG, runner=runner)
    start = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    shutdown = asyncio.create_task(engine.shutdown())
    await asyncio.sleep(0)
    assert not shutdown.done()  # what is being loaded has to be given back first
    runner.may_load.set()
    await shutdown
    with pytest.raises(EngineStartError, match=r"shutdown\(\) was called meanwhile"):
        await start
    assert runner.num_closes
    assert not engine_tasks()


async def test_a_start_that_is_cancelled_leaves_nothing_to_shut_down() -> None:
    runner = SlowToLoad()
    engine = AsyncEngine(CONFIG, runner=runner)
    start = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert runner.num_closes == 1
    await engine.shutdown()
    assert not engine_tasks()


async def test_shutdowns_at_once_all_return_after_the_end() -> None:
    engine = AsyncEngine(CONFIG)
    await engine.start()
    endless = SamplingParams(max_tokens=4000, ignore_eos=True)
    stream = await engine.add_request([5, 6], endless)
    await asyncio.gather(*(engine.shutdown(drain_timeout=0.02) for _ in range(3)))
    assert not engine_tasks()
    assert [o.finish_reason async for o in stream][-1] == "abort"


class Mortal(SimulatedRunner):
    """Dies when it is told to."""

    def __init__(self) -> None:
        super().__init__(CONFIG, ModelInfo(CONFIG.model))
        self.is_dead = False
        self.tell: Callable[[], None] = lambda: None

    def watch(self, on_death: Callable[[], None]) -> None:
        self.tell = on_death

    def check(self) -> None:
        if self.is_dead:
            raise RunnerDeadError("a rank is gone")


async def test_an_idle_engine_ends_when_its_runner_dies() -> None:
    runner = Mortal()
    async with AsyncEngine(CONFIG, runner=runner) as engine:
        assert await count_tokens(engine) == 3
        runner.is_dead = True
        runner.tell()
        with pytest.raises(EngineDeadError, match="a rank is gone"):
            await engine.wait_ended()
        with pytest.raises(EngineDeadError, match="a rank is gone"):
            await engine.add_request([1, 2], SHORT)
