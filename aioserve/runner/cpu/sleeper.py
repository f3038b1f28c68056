"""The model on its thread, which can give back its memory for a while, and change its weights.

What that takes of the model knows `resident`. Free of torch, as the runner is.
"""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo, read_same_model
from aioserve.runner.cpu.runner import ThreadedRunner

if TYPE_CHECKING:
    from aioserve.config import EngineConfig
    from aioserve.kv_connector import KVConnectorWorker
    from aioserve.model_source.adapter import AdapterFiles
    from aioserve.runner.cpu.executor import StepExecutor
    from aioserve.runner.cpu.resident import ResidentModel


class SleepingRunner(ThreadedRunner):
    """Without weights it has no executor. No step is handed over then."""

    _resident: "ResidentModel | None" = None

    @property
    def _model(self) -> "ResidentModel":
        assert self._resident is not None, "load() first"
        return self._resident

    def make_kv_worker(self, num_bytes: int) -> "KVConnectorWorker":
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

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
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
        from aioserve.runner.cpu.resident import ResidentModel

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
