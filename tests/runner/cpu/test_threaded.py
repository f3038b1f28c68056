"""The runner's thread: built, used and closed there; nothing heavy is imported before."""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.cpu.runner import ThreadedRunner
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from aioserve.support import progress
from tests import processes
from tests.models import make_model
from tests.runner.driver import NUM_BLOCKS, make_config

EMPTY_STEP = SchedulerOutput(0, [], CachedRequestData([], [], {}), {}, 0, [], [])


def make_runner(path: Path) -> ThreadedRunner:
    config = make_config(path)
    return ThreadedRunner(config, ModelInfo(config.model))


def test_steps_run_in_order_on_one_thread(model_path: Callable[..., Path]) -> None:
    async def run() -> None:
        runner = make_runner(model_path("llama"))
        assert (await runner.load()).num_kv_blocks == NUM_BLOCKS
        assert runner.num_compute_threads == 1
        request = NewRequestData(
            "a", [1, 2, 3], 3, SamplingParams(temperature=0), frozenset(), [5], 0
        )
        first = SchedulerOutput(0, [request], CachedRequestData([], [], {}), {"a": 3}, 3, [], [])
        second = SchedulerOutput(1, [], CachedRequestData(["a"], [3], {}), {"a": 1}, 1, [], [])
        outputs = await asyncio.gather(runner.execute_model(first), runner.execute_model(second))
        assert [len(output.sampled_token_ids[0]) for output in outputs] == [1, 1]
        await runner.close()
        await runner.close()
        with pytest.raises(RunnerDeadError):
            await runner.execute_model(EMPTY_STEP)

    asyncio.run(run())
    assert not [t for t in threading.enumerate() if t.name.startswith("aioserve-runner")]


def test_load_passes_on_config_errors_and_close_still_works(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    (path / "model.safetensors").unlink()

    async def run() -> None:
        runner = make_runner(path)
        with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
            await runner.load()
        with pytest.raises(RunnerDeadError):
            await runner.execute_model(EMPTY_STEP)
        await runner.close()

    asyncio.run(run())


class Held(logging.Handler):
    """Holds the thread that loads at the line of its first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.is_there.set()
        assert self.may_go_on.wait(processes.PATIENCE)


def test_a_load_that_is_cancelled_ends_before_its_next_layer(
    model_path: Callable[..., Path],
) -> None:
    held, logger = Held(), logging.getLogger(progress.__name__)

    async def run() -> None:
        runner = make_runner(model_path("llama"))
        loading = asyncio.create_task(runner.load())
        await asyncio.to_thread(held.is_there.wait, processes.PATIENCE)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        held.may_go_on.set()
        await runner.close()

    logger.addHandler(held)
    level, logger.level = logger.level, logging.INFO
    try:
        asyncio.run(run())
    finally:
        logger.removeHandler(held)
        logger.level = level
    assert not [line for line in held.lines if line.startswith("Checking fused layers")]
