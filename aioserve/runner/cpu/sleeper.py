"""The model on its thread, which can give back its memory for a while, and change its weights.

Knows that the scheduler counts on as many blocks and slots as there were. Free of torch, as the
runner is.
"""

import asyncio
import gc
from typing import TYPE_CHECKING

import msgspec

from aioserve.config import CacheConfig, EngineConfig
from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo, read_same_model
from aioserve.runner.cpu.runner import ThreadedRunner

if TYPE_CHECKING:
    from aioserve.kv_connector import KVConnectorWorker
    from aioserve.model_source.adapter import AdapterFiles
    from aioserve.runner.low_rank import Adapter


class SleepingRunner(ThreadedRunner):
    """Without weights it has no executor. No step is handed over then."""

    def __init__(self, config: EngineConfig, model_info: ModelInfo) -> None:
        super().__init__(config, model_info)
        self._made_cache = config.cache
        # What outlives an executor: it is of the model's sizes, and of none of its weights.
        self._adapters: dict[str, Adapter] = {}
        self._host_blocks: KVConnectorWorker | None = None

    def make_kv_worker(self, num_bytes: int) -> "KVConnectorWorker":
        self._host_blocks = worker = super().make_kv_worker(num_bytes)
        return worker

    def check_sleep(self, *, frees_weights: bool) -> None:
        pass  # it can

    async def sleep(self, *, frees_weights: bool) -> None:
        await self._submit(self._free if frees_weights else self._release_kv)

    async def wake(self) -> None:
        if self._executor is None:
            await self._submit(lambda: self._load_again(self._model_info))

    async def check_weights(self, path: str) -> None:
        await self._read(path)

    async def load_weights(self, path: str) -> None:
        info = await self._read(path)
        await self._submit(lambda: self._load_again(info))

    async def _read(self, path: str) -> ModelInfo:
        config = msgspec.structs.replace(self._model_info.config, model=path)
        return await asyncio.to_thread(read_same_model, config, self._model_info)

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
        if self._executor is None and self._thread is not None:
            raise ConfigError("the engine is asleep: wake it first")
        await super().load_adapter(adapter_id, files)

    def unload_adapter(self, adapter_id: str) -> None:
        super().unload_adapter(adapter_id)
        if self._thread is not None:  # also if it is unloaded in a sleep
            self._submit(lambda: self._adapters.pop(adapter_id, None))

    # What follows runs on the runner's thread.

    def _load_again(self, info: ModelInfo) -> None:
        """Load the model with as many blocks and slots as before: the scheduler counts on them."""
        from aioserve.runner.cpu.load import load_on_cpu
        from aioserve.runner.cpu.machine import give_back_freed_memory
        from aioserve.runner.host_blocks import HostBlocks

        config = msgspec.structs.replace(self._config, model=info.config, cache=self._geometry())
        made = load_on_cpu(config, info, self.grammars)
        self._free()
        for adapter_id, adapter in self._adapters.items():
            made.adapters.load(adapter_id, adapter)
        if isinstance(self._host_blocks, HostBlocks):
            made.memory.take_host_blocks(self._host_blocks)
        self._executor, self._model_info = made, info
        give_back_freed_memory()

    def _geometry(self) -> CacheConfig:
        """The sizes that the settings of the cache have come to."""
        if (executor := self._executor) is not None:
            info = executor.info
            self._made_cache = msgspec.structs.replace(
                self._config.cache,
                kv_cache_gib=None,
                num_kv_blocks=info.num_kv_blocks,
                num_state_slots=info.num_state_slots,
                num_window_blocks=None if info.windows is None else info.windows.num_blocks,
            )
        return self._made_cache

    def _free(self) -> None:
        from aioserve.runner.cpu.machine import give_back_freed_memory

        if self._executor is not None:
            self._geometry()
            self._adapters = dict(self._executor.adapters.loaded)
            self._executor.close()
            self._executor = None
            gc.collect()  # modules know each other
            give_back_freed_memory()

    def _release_kv(self) -> None:
        assert self._executor is not None, "awake"
        self._executor.release_kv()
