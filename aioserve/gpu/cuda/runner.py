"""The overlapped runner: one thread launches steps, another reads their results.

So the next step is on its way before the last one's tokens are read, and the thread that waits for
the device keeps no other waiting. Where tokens are guessed, one thread does both, one step after
another. Last, a runner that can give a card's memory back, or change its weights. Free of torch
until `load`.
"""

import asyncio
import logging
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.model_source.info import ModelInfo, read_same_model
from aioserve.outputs import EMPTY_RUNNER_OUTPUT, ModelRunnerOutput
from aioserve.runner.interface import OUTPUT_COMPILERS, OutputCompiler, RunnerInfo, RunnerInterface
from aioserve.scheduler.output import SchedulerOutput
from aioserve.support.progress import interruptible

if TYPE_CHECKING:
    from aioserve.features.kv_connector import KVConnectorWorker
    from aioserve.gpu.cuda.device import Device
    from aioserve.gpu.cuda.executor import LaunchedParts, StepExecutor
    from aioserve.gpu.cuda.host_blocks import DeviceBlocks
    from aioserve.runner.interface import AdapterFiles

logger = logging.getLogger(__name__)

_Launched: TypeAlias = "LaunchedParts | ModelRunnerOutput | Exception"


class OverlappedRunner(RunnerInterface):
    """A runner with a `StepExecutor`. Each result reaches the loop by one call from the reading
    thread.
    """

    def __init__(
        self, build: "Callable[[], StepExecutor]", grammars: OutputCompiler | None = None
    ) -> None:
        """`build` loads the model, on the launching thread; it may raise `ConfigError`."""
        self._build = build
        self.grammars = grammars
        self._executor: StepExecutor | None = None
        self._tasks: queue.SimpleQueue[Callable[[StepExecutor], None] | None]
        self._tasks = queue.SimpleQueue()  # of the launching thread
        self._launched: queue.SimpleQueue[tuple[_Launched, _Reply] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._is_unwanted = threading.Event()  # what is being loaded

    async def load(self) -> RunnerInfo:
        loaded = _Reply()
        for name, target in (("launch", lambda: self._launch(loaded)), ("read", self._read)):
            thread = threading.Thread(target=target, name=f"aioserve-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            await loaded.future
        except asyncio.CancelledError:
            self._is_unwanted.set()
            raise
        if self.grammars is not None:
            await self.grammars.prepare()
        assert self._executor is not None, "it has answered"
        return self._executor.info

    def make_kv_worker(self, num_bytes: int) -> "KVConnectorWorker":
        assert self._executor is not None, "load() first"
        return self._executor.make_host_blocks(num_bytes)

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        return self._submit(
            lambda executor, reply: self._launched.put(
                (self._launch_step(executor, scheduler_output), reply)
            )
        )

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
        if (executor := self._executor) is None:
            raise RunnerDeadError("the model runner is closed")
        adapter = await asyncio.to_thread(executor.adapters.put, files)
        await self._change(lambda executor: executor.adapters.load(adapter_id, adapter))

    def unload_adapter(self, adapter_id: str) -> None:
        self._change(lambda executor: executor.adapters.unload(adapter_id))

    def _do(self, function: Callable[[], None]) -> "asyncio.Future[Any]":
        """Run `function` on the launching thread between two steps; the future tells what it
        raised.
        """

        def do(_: "StepExecutor", reply: _Reply) -> None:
            try:
                function()
            except Exception as error:
                reply.send(error)
            else:
                reply.send(None)

        return self._submit(do)

    def _change(self, function: "Callable[[StepExecutor], None]") -> "asyncio.Future[Any]":
        """Run `function` with the executor between two steps; the future tells when it is done."""

        def change(executor: "StepExecutor", reply: _Reply) -> None:
            function(executor)
            reply.send(None)

        return self._submit(change)

    def _submit(self, task: "Callable[[StepExecutor, _Reply], None]") -> "asyncio.Future[Any]":
        """Do it on the launching thread, after what was submitted before. It completes the reply,
        or has the reading thread do so.
        """
        reply = _Reply()
        if self._is_closed:
            reply.future.set_exception(RunnerDeadError("the model runner is closed"))
            reply.future.exception()  # of `unload_adapter`, which is never awaited
        else:
            self._tasks.put(lambda executor: task(executor, reply))
        return reply.future

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._tasks.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        if self._executor is not None:
            self._executor.close()
        self._executor = None  # and with it weights and KV cache
        if self.grammars is not None:
            self.grammars.close()

    # On the launching thread.

    def _launch(self, loaded: "_Reply") -> None:
        import torch

        with torch.inference_mode():
            try:
                with interruptible(self._is_unwanted):
                    self._executor = self._build()
                self._executor.attach()  # it may have been built elsewhere
            except BaseException as error:
                loaded.send(error)
            else:
                loaded.send(None)
                while (task := self._tasks.get()) is not None:
                    task(self._executor)
        self._launched.put(None)

    def _launch_step(self, executor: "StepExecutor", step: SchedulerOutput) -> "_Launched":
        try:
            launched = executor.launch(step)
            if launched is None:
                return EMPTY_RUNNER_OUTPUT
            return executor.finish(launched) if executor.is_one_by_one else launched
        except Exception as error:
            return self._explain(executor, error)

    def _explain(self, executor: "StepExecutor", error: Exception) -> Exception:
        """Return what an error of a step means."""
        return executor.explain(error)

    # On the reading thread.

    def _read(self) -> None:
        while (item := self._launched.get()) is not None:
            launched, reply = item
            if not isinstance(launched, (Exception, ModelRunnerOutput)):
                assert self._executor is not None
                try:
                    launched = self._executor.finish(launched)
                except Exception as error:
                    launched = self._explain(self._executor, error)
            reply.send(launched)


class _Reply:
    """A future of the loop that another thread completes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def send(self, result: object) -> None:
        """Complete it with a result, or with an exception; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._complete, result)
        except RuntimeError:  # the loop is closed: no task waits
            logger.debug("a result came after the end of the event loop")

    def _complete(self, result: object) -> None:
        if self.future.cancelled():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
            self.future.exception()  # a caller that died of an earlier one awaits no more
        else:
            self.future.set_result(result)


# The model on its thread, which can give back its memory for a while, and change its weights. A
# card has no room for two: the old weights go before the new ones are read, and are read again if
# these cannot be.


#: Loads a model on the card, on the launching thread.
Make = Callable[[EngineConfig, ModelInfo], "StepExecutor"]


class SleepingOverlappedRunner(OverlappedRunner):
    """A runner that can give its memory back. Meanwhile it has no executor, and no step is handed
    over.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_info: ModelInfo,
        make: Make,
        grammars: OutputCompiler | None = None,
    ) -> None:
        """`make` may raise `ConfigError`; it may be called again, for memory of the same sizes."""
        super().__init__(lambda: make(config, model_info), grammars)
        self._config, self._model_info, self._make = config, model_info, make
        # What outlives an executor: it is of the model's sizes, and of none of its weights.
        self._adapters: dict[str, Any] = {}
        self._blocks: DeviceBlocks | None = None

    @classmethod
    def on_cuda(cls, config: EngineConfig, model_info: ModelInfo) -> "SleepingOverlappedRunner":
        """Raises `ConfigError` if the model cannot be as long as the settings ask."""
        model_info.check_positions()
        grammars = None
        if not model_info.config.skip_tokenizer_init:
            grammars = OUTPUT_COMPILERS["llguidance"](model_info, config.structured_outputs)
        devices: list[Device] = []  # one, whose queues serve whatever is loaded

        def make(config: EngineConfig, info: ModelInfo) -> "StepExecutor":
            from aioserve.gpu.cuda.load import load_on_cuda

            # Else the thread with the GIL keeps it for 5 ms: a busy loop would hold the launching
            # thread up for several steps of a small model (measured on a CPU: p99 halved).
            sys.setswitchinterval(0.0005)
            return load_on_cuda(config, info, grammars, devices=devices)

        return cls(config, model_info, make, grammars)

    def make_kv_worker(self, num_bytes: int) -> "KVConnectorWorker":
        assert self._executor is not None, "load() first"
        self._blocks = self._executor.make_host_blocks(num_bytes)
        return self._blocks

    def check_sleep(self, *, frees_weights: bool) -> None:
        if not frees_weights:
            raise ConfigError(
                "on a CUDA device sleep gives back the weights with the KV cache, whose place is "
                "known to captured graphs: ask for both (weights)"
            )

    async def sleep(self, *, frees_weights: bool) -> None:
        await self._do(self._free)

    async def wake(self) -> None:
        if self._executor is None:
            await self._do(lambda: self._load_again(self._model_info))

    async def check_weights(self, path: str) -> None:
        await self._read_info(path)

    async def load_weights(self, path: str) -> None:
        info = await self._read_info(path)
        await self._do(lambda: self._load_again(info))

    async def _read_info(self, path: str) -> ModelInfo:
        known = self._model_info
        config = msgspec.structs.replace(known.config, model=path)
        return await asyncio.to_thread(read_same_model, config, known)

    async def load_adapter(self, adapter_id: str, files: "AdapterFiles") -> None:
        if self._executor is None and not self._is_closed:
            raise ConfigError("the engine is asleep: wake it first")
        await super().load_adapter(adapter_id, files)

    def unload_adapter(self, adapter_id: str) -> None:
        self._do(lambda: self._drop_adapter(adapter_id))

    # On the launching thread.

    def _launch_step(self, executor: "StepExecutor", step: SchedulerOutput) -> "_Launched":
        if self._executor is None:
            return RunnerDeadError("no model could be loaded again after its weights were freed")
        return super()._launch_step(executor, step)

    def _drop_adapter(self, adapter_id: str) -> None:
        self._adapters.pop(adapter_id, None)
        if self._executor is not None:
            self._executor.adapters.unload(adapter_id)

    def _free(self) -> None:
        """Give back what the model takes of the card. Idempotent."""
        if (executor := self._executor) is None:
            return
        from aioserve.gpu.cuda.load import give_back_freed_memory

        info = executor.info
        cache = msgspec.structs.replace(
            self._config.cache,
            kv_cache_gib=None,
            num_kv_blocks=info.num_kv_blocks,
            num_window_blocks=0 if info.windows is None else info.windows.num_blocks,
        )
        self._config = msgspec.structs.replace(self._config, cache=cache)
        self._adapters = dict(executor.adapters.loaded)
        self._executor = None
        executor.close()
        give_back_freed_memory()

    def _load_again(self, info: ModelInfo) -> None:
        """Load the model of `info` with as many blocks as before: the scheduler counts on them. If
        that cannot be, a model that was there is loaded again.
        """
        before = None if self._executor is None else self._model_info
        self._free()
        try:
            self._executor = self._load_of(info)
        except Exception as error:
            from aioserve.gpu.cuda.load import give_back_freed_memory

            _clear_frames(error)  # a card has no room for what they hold beside the old weights
            give_back_freed_memory()
            if before is not None:
                self._executor = self._load_of(before)
            raise
        self._model_info = info

    def _load_of(self, info: ModelInfo) -> "StepExecutor":
        made = self._make(msgspec.structs.replace(self._config, model=info.config), info)
        try:
            for adapter_id, adapter in self._adapters.items():
                made.adapters.load(adapter_id, adapter)
            if self._blocks is not None:
                made.take_host_blocks(self._blocks)
        except BaseException:
            made.close()
            raise
        return made


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of the calls that raised `error`, and of those that raised the
    errors behind it: a model that was being loaded is among them.
    """
    found: list[BaseException | None] = [error]
    seen: set[int] = set()
    while found:
        if (each := found.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            found += each.__cause__, each.__context__
