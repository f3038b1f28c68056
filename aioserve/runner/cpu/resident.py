"""A model on the thread that computes, which gives back its memory for a while, or its weights.

So does every rank of a model with its share. Knows that the scheduler counts on as many blocks and
slots as there were.
"""

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from aioserve.config import CacheConfig, EngineConfig
from aioserve.model_info import ModelInfo
from aioserve.runner.cpu.executor import StepExecutor
from aioserve.runner.cpu.machine import give_back_freed_memory

if TYPE_CHECKING:
    from aioserve.runner.host_blocks import HostBlocks, SharedSlots
    from aioserve.runner.low_rank import Adapter

#: Loads a model, or a rank's share of it.
Make = Callable[[EngineConfig, ModelInfo], StepExecutor]


class ResidentModel:
    """Without weights it has no `executor`. No step is handed over then."""

    def __init__(self, config: EngineConfig, info: ModelInfo, make: Make) -> None:
        """Loads it by `make`, which raises `ConfigError`."""
        self._config, self.info, self._make = config, info, make
        self.executor: StepExecutor | None = make(config, info)
        self._made_cache = config.cache
        # What outlives an executor: it is of the model's sizes, and of none of its weights.
        self.adapters: dict[str, Adapter] = {}
        self.host_blocks: HostBlocks | None = None

    def make_host_blocks(self, num_bytes: int, shared: "SharedSlots | None" = None) -> "HostBlocks":
        """Make room for KV blocks in host memory, of at most `num_bytes` of all ranks, which share
        it. Raises `ConfigError`.
        """
        assert self.executor is not None, "awake"
        self.host_blocks = blocks = self.executor.copies.make(num_bytes, shared)
        return blocks

    def load(self, info: ModelInfo, cache: CacheConfig) -> None:
        """Load the model of `info` with a KV cache of the sizes of `cache`, then free the one that
        is there. Raises `ConfigError`; nothing has changed then.
        """
        made = self._make(
            msgspec.structs.replace(self._config, model=info.config, cache=cache), info
        )
        self.free()
        for adapter_id, adapter in self.adapters.items():
            made.adapters.load(adapter_id, adapter)
        if self.host_blocks is not None:
            made.copies.take(self.host_blocks)
        self.executor, self.info = made, info
        give_back_freed_memory()

    @property
    def geometry(self) -> CacheConfig:
        """The settings of the cache with the sizes that they have come to."""
        if (executor := self.executor) is not None:
            info = executor.info
            self._made_cache = msgspec.structs.replace(
                self._config.cache,
                kv_cache_gib=None,
                num_kv_blocks=info.num_kv_blocks,
                num_state_slots=info.num_state_slots,
                num_window_blocks=None if info.windows is None else info.windows.num_blocks,
            )
        return self._made_cache

    def free(self, *, weights: bool = True) -> None:
        """Give back the memory of the KV cache, and by default of the weights. Idempotent."""
        if self.executor is None:
            return
        if not weights:
            self.executor.release_kv()
            return
        self._made_cache = self.geometry
        self.adapters = dict(self.executor.adapters.loaded)
        self.executor.close()
        self.executor = None
        _collect()
        give_back_freed_memory()

    def drop_adapter(self, adapter_id: str) -> None:
        """Forget an adapter, also while the weights are gone."""
        self.adapters.pop(adapter_id, None)
        if self.executor is not None:
            self.executor.adapters.unload(adapter_id)


def _collect() -> None:
    """Free the modules of a model, which know each other; of a process that has `gc.freeze` done
    since they were made as well.
    """
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
