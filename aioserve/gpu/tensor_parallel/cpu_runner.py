"""The model on several processes: this one is the first rank, and hands each step to the others.

A `SleepingRunner` in all else: it samples, masks and pools alone, and what becomes of its model it
has the others do with theirs. Knows ranks and their end.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from aioserve.config import EngineConfig
from aioserve.errors import RunnerDeadError
from aioserve.gpu.tensor_parallel.plan import check_model, check_settings
from aioserve.gpu.tensor_parallel.processes import (
    DropAdapter,
    Free,
    Load,
    MakeHostBlocks,
    Message,
    ReadAdapter,
    Sampled,
    Step,
    UseAdapter,
)
from aioserve.gpu.tensor_parallel.watch import FirstRankRunner
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.cpu.runner import SleepingRunner
from aioserve.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from torch import Tensor

    from aioserve.features.kv_connector import KVConnectorWorker
    from aioserve.runner.batch.masks import Masks
    from aioserve.runner.batch.sampling_columns import SamplingInputs
    from aioserve.runner.cpu.executor import StepExecutor
    from aioserve.runner.cpu.sampler import SampledTokens
    from aioserve.runner.interface import AdapterFiles


T = TypeVar("T")


class ShardedRunner(FirstRankRunner, SleepingRunner):
    """Ends, and says so, when one of its ranks does: without it the others have no whole model."""

    _rank_module = "aioserve.gpu.tensor_parallel.cpu_following_rank"
    _is_sampled = False  # whether the others know what the step has chosen

    def __init__(self, config: EngineConfig, model_info: ModelInfo) -> None:
        """Raises `ConfigError` for settings that do not go with ranks."""
        check_settings(config)
        super().__init__(config, model_info)

    @property
    def num_compute_threads(self) -> int | None:
        """The threads of all ranks, if the others have as many as the first."""
        own = super().num_compute_threads
        return None if own is None else own * self._config.runner.tensor_parallel_size

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
        """All ranks read it beside steps; what one of them refuses, all leave out."""
        self._check_awake()
        if (executor := self._executor) is None:
            raise RunnerDeadError("the model runner is closed")
        told = ReadAdapter(adapter_id, str(files.path), files.digest)
        await self._submit(lambda: self._others.tell(told))
        putting = asyncio.to_thread(executor.adapters.put, files)
        [adapter] = await asyncio.gather(putting, return_exceptions=True)
        await self._submit(lambda: self._use_adapter(adapter_id, adapter))

    def make_kv_worker(self, num_bytes: int) -> "KVConnectorWorker":
        assert self._thread is not None, "load() first"
        return self._thread.submit(self._make_host_blocks, num_bytes).result()

    def _submit(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        future = super()._submit(function)
        future.add_done_callback(self._note_death)
        return future

    def _note_death(self, future: "asyncio.Future[T]") -> None:
        """Between steps as well no further one can run if ranks no longer agree."""
        if self._thread is not None and not future.cancelled():
            error = future.exception()
            if isinstance(error, RunnerDeadError) and self._death is None:
                self._die(error)

    # What follows runs on the runner's thread.

    def _load(self) -> "StepExecutor":
        check_model(self._config, self._model_info)
        with self._loading():
            return super()._load()

    def _make(self, config: EngineConfig, info: ModelInfo) -> "StepExecutor":
        from aioserve.runner.cpu.load import load_on_cpu

        executor = load_on_cpu(config, info, self.grammars, self._ranks)
        executor.choose = self._choose
        return executor

    def _load_again(self, info: ModelInfo) -> None:
        with self._all_told(Load(info.config, self._model.geometry)):
            with self._met.together():
                pass  # the others read which model it is
            super()._load_again(info)

    def _make_host_blocks(self, num_bytes: int) -> "KVConnectorWorker":
        from aioserve.features.kv_connector.host_blocks import SharedSlots

        assert self._executor is not None, "awake"
        of_first = self._executor.copies.bytes_of_first
        slots = SharedSlots(self._others.kv_file, self._met, of_first)
        with self._all_told(MakeHostBlocks(num_bytes, of_first)), self._met.together():
            return self._model.make_host_blocks(num_bytes, slots)

    def _use_adapter(self, adapter_id: str, adapter: "object | BaseException") -> None:
        with self._all_told(UseAdapter(adapter_id)):
            with self._met.together():
                if isinstance(adapter, BaseException):
                    raise adapter
            assert self._executor is not None, "awake"
            self._executor.adapters.load(adapter_id, adapter)

    def _drop_adapter(self, adapter_id: str) -> None:
        with self._all_told(DropAdapter(adapter_id)):
            super()._drop_adapter(adapter_id)

    def _free(self, *, weights: bool) -> None:
        with self._all_told(Free(weights)):
            super()._free(weights=weights)

    @contextlib.contextmanager
    def _all_told(self, message: Message) -> Iterator[None]:
        """The other ranks do the same as the block. Raises `SharedError` if all have heard that it
        cannot be done; for all else that goes wrong `RunnerDeadError`.
        """
        from aioserve.gpu.tensor_parallel.group import SharedError

        try:
            self._others.tell(message)
            yield
        except SharedError:
            raise
        except Exception as error:
            raise self._end_of(error) from error

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._is_sampled = False
        try:
            self._others.tell(Step(scheduler_output))
            return super()._execute(scheduler_output)
        except Exception as error:
            if self._is_sampled:  # all have come as far as that: only this step is lost
                raise
            raise self._end_of(error) from error

    def _choose(
        self, logits: "Tensor", inputs: "SamplingInputs", masks: "Masks | None"
    ) -> "SampledTokens":
        from aioserve.runner.cpu.sampler import sample_each

        self._is_sampled = True
        try:
            sampled = sample_each(logits, inputs, masks)
        except Exception:
            self._others.tell(Sampled(None))
            raise
        self._others.tell(Sampled(sampled.token_ids.tolist()))
        return sampled
