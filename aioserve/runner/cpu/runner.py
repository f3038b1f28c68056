"""The model runner on a thread of its own: built, used and closed there, in order.

Free of torch until `load`, which imports it on that thread. Knows nothing about models.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from aioserve.config import EngineConfig
from aioserve.errors import RunnerDeadError
from aioserve.model_info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from aioserve.runner.cpu.executor import ModelRunner

T = TypeVar("T")


class ThreadedRunner(RunnerInterface):
    """Runs `ModelRunner` on one thread; steps queue up there in the order of the calls."""

    def __init__(self, config: EngineConfig, model_info: ModelInfo) -> None:
        """Raises `ConfigError` if the model cannot be as long as the settings ask."""
        model_info.check_positions()
        self._config = config
        self._model_info = model_info
        # inference mode and the number of compute threads are properties of a thread in torch
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="aioserve-runner"
        )
        self._runner: ModelRunner | None = None

    async def load(self) -> None:
        await self._submit(self._load)

    @property
    def num_kv_blocks(self) -> int:
        assert self._runner is not None, "load() first"
        return self._runner.num_kv_blocks

    @property
    def num_compute_threads(self) -> int | None:
        return None if self._runner is None else self._runner.num_compute_threads

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        return self._submit(lambda: self._execute(scheduler_output))

    async def close(self) -> None:
        if self._executor is None:
            return
        closed = self._submit(self._close)
        executor, self._executor = self._executor, None
        try:
            await closed
        finally:
            executor.shutdown()  # the thread is idle: this only joins it

    def _submit(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        if self._executor is None:
            dead: asyncio.Future[T] = loop.create_future()
            dead.set_exception(RunnerDeadError("the model runner is closed"))
            return dead
        return loop.run_in_executor(self._executor, function)

    # What follows runs on the runner's thread.

    def _load(self) -> None:
        from aioserve.runner.cpu.executor import ModelRunner

        runner = ModelRunner(self._config, self._model_info)
        runner.load()
        self._runner = runner

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self._runner is None:
            raise RunnerDeadError("the model runner was not loaded")
        return self._runner.execute_model(scheduler_output)

    def _close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
