"""The model on a thread of its own: loaded, used, put to sleep and given back there, in order.

Free of torch until `load`, which imports it on that thread. Knows nothing about models.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.model_source.info import ModelInfo, read_same_model
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import (
    OUTPUT_COMPILERS,
    AdapterFiles,
    KVConnectorWorker,
    RunnerInfo,
    RunnerInterface,
)
from aioserve.scheduler.output import SchedulerOutput
from aioserve.support.progress import interruptible

if TYPE_CHECKING:
    from aioserve.runner.cpu.executor import ResidentModel, StepExecutor


T = TypeVar("T")


class ThreadedRunner(RunnerInterface):
    """A runner with a `StepExecutor` on one thread; steps queue up in the order of the calls."""

    def __init__(self, config: EngineConfig, model_info: ModelInfo) -> None:
        """Raises `ConfigError` if the model cannot be as long as the settings ask."""
        model_info.check_positions()
        self._config = config
        self._model_info = model_info
        # inference mode and the number of compute threads are properties of a thread in torch
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="aioserve-runner"
        )
        self._executor: StepExecutor | None = None
        self._is_unwanted = threading.Event()  # what is being loaded
        if not model_info.config.skip_tokenizer_init:
            self.grammars = OUTPUT_COMPILERS["llguidance"](model_info, config.structured_outputs)

    async def load(self) -> RunnerInfo:
        try:
            info = await self._submit(self._load_unless_unwanted)
        except asyncio.CancelledError:
            self._is_unwanted.set()
            raise
        if self.grammars is not None:
            await self.grammars.prepare()
        return info

    @property
    def num_compute_threads(self) -> int | None:
        return None if self._executor is None else self._executor.num_compute_threads

    def make_kv_worker(self, num_bytes: int) -> KVConnectorWorker:
        assert self._executor is not None, "load() first"
        return self._executor.copies.make(num_bytes)

    async def load_adapter(self, adapter_id: str, files: AdapterFiles) -> None:
        if (executor := self._executor) is None:
            raise RunnerDeadError("the model runner is closed")
        adapter = await asyncio.to_thread(executor.adapters.put, files)
        await self._submit(lambda: executor.adapters.load(adapter_id, adapter))

    def unload_adapter(self, adapter_id: str) -> None:
        if (executor := self._executor) is not None and self._thread is not None:
            self._submit(lambda: executor.adapters.unload(adapter_id))

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        return self._submit(lambda: self._execute(scheduler_output))

    async def close(self) -> None:
        if self._thread is None:
            return
        closed = self._submit(self._close)
        thread, self._thread = self._thread, None
        try:
            await closed
        finally:
            thread.shutdown()  # it is idle: this only joins it
            if self.grammars is not None:
                self.grammars.close()

    def _submit(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        if self._thread is None:
            dead: asyncio.Future[T] = loop.create_future()
            dead.set_exception(RunnerDeadError("the model runner is closed"))
            return dead
        return loop.run_in_executor(self._thread, function)

    # What follows runs on the runner's thread.

    def _load_unless_unwanted(self) -> RunnerInfo:
        with interruptible(self._is_unwanted):
            self._executor = self._load()
        return self._executor.info

    def _load(self) -> "StepExecutor":
        from aioserve.runner.cpu.load import load_on_cpu

        return load_on_cpu(self._config, self._model_info, self.grammars)

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self._executor is None:
            raise RunnerDeadError("the model runner was not loaded")
        return self._executor.execute_model(scheduler_output)

    def _close(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None


# The model on its thread, which can give back its memory for a while, and change its weights. What
# that takes of the model knows `ResidentModel`. Free of torch, as the runner is.


class SleepingRunner(ThreadedRunner):
    """A runner that can give its weights back. Without them it has no executor, and no step is
    handed over.
    """

    _resident: "ResidentModel | None" = None

    @property
    def _model(self) -> "ResidentModel":
        assert self._resident is not None, "load() first"
        return self._resident

    def make_kv_worker(self, num_bytes: int) -> KVConnectorWorker:
        return self._model.make_host_blocks(num_bytes)

    def check_sleep(self, *, frees_weights: bool) -> None:
        pass  # it can

    async def sleep(self, *, frees_weights: bool) -> None:
        await self._submit(lambda: self._free(weights=frees_weights))

    async def wake(self) -> None:
        if self._executor is None:
            await self._submit(lambda: self._load_again(self._model.info))

    async def check_weights(self, path: str) -> None:
        await self._read(path)

    async def load_weights(self, path: str) -> None:
        info = await self._read(path)
        await self._submit(lambda: self._load_again(info))

    async def _read(self, path: str) -> ModelInfo:
        known = self._model_info
        config = msgspec.structs.replace(known.config, model=path)
        return await asyncio.to_thread(read_same_model, config, known)

    async def load_adapter(self, adapter_id: str, files: AdapterFiles) -> None:
        self._check_awake()
        await super().load_adapter(adapter_id, files)

    def _check_awake(self) -> None:
        if self._executor is None and self._thread is not None:
            raise ConfigError("the engine is asleep: wake it first")

    def unload_adapter(self, adapter_id: str) -> None:
        if self._thread is not None and self._resident is not None:  # also in a sleep
            self._submit(lambda: self._drop_adapter(adapter_id))

    # What follows runs on the runner's thread.

    def _load(self) -> "StepExecutor":
        from aioserve.runner.cpu.executor import ResidentModel

        self._resident = ResidentModel(self._config, self._model_info, self._make)
        assert self._resident.executor is not None
        return self._resident.executor

    def _make(self, config: "EngineConfig", info: ModelInfo) -> "StepExecutor":
        from aioserve.runner.cpu.load import load_on_cpu

        return load_on_cpu(config, info, self.grammars)

    def _close(self) -> None:
        super()._close()
        self._resident = None

    def _load_again(self, info: ModelInfo) -> None:
        """Load the model with as many blocks and slots as before: the scheduler counts on them."""
        self._model.load(info, self._model.geometry)
        self._executor, self._model_info = self._model.executor, info

    def _drop_adapter(self, adapter_id: str) -> None:
        self._model.drop_adapter(adapter_id)

    def _free(self, *, weights: bool) -> None:
        self._model.free(weights=weights)
        self._executor = self._model.executor
