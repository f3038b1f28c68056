"""The model on a thread of its own: loaded, used, put to sleep and given back there, in order.

Free of torch until `load`, which imports it on that thread. Knows nothing about models. Last, the
executor whose thread it is, and how results come from there to the event loop.
"""

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

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
P = ParamSpec("P")

#: Seconds for which the event loop leaves Python's lock to a step that begins, at most: several
#: times as long as it takes to make the arrays of a step.
GO_FIRST_SECONDS = 5e-4


class ThreadedRunner(RunnerInterface):
    """A runner with a `StepExecutor` on one thread; steps queue up in the order of the calls."""

    def __init__(self, config: EngineConfig, model_info: ModelInfo) -> None:
        """Raises `ConfigError` if the model cannot be as long as the settings ask."""
        model_info.check_positions()
        self._config = config
        self._model_info = model_info
        # inference mode and the number of compute threads are properties of a thread in torch
        self._thread: OneThread | None = OneThread("aioserve-runner")
        self._executor: StepExecutor | None = None
        self._step: asyncio.Future[ModelRunnerOutput] | None = None  # the last one
        self._gate = threading.Lock()  # opened by a step that needs Python's lock no more
        self._open_gate = partial(_open, self._gate)
        self._inference_mode: AbstractContextManager[None] | None = None
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
        is_idle = self._step is None or self._step.done()
        self._gate.acquire(blocking=False)
        self._step = step = self._submit(lambda: self._execute(scheduler_output))
        if is_idle and scheduler_output.total_num_scheduled_tokens and not step.done():
            # What the loop does next would hold the lock until it waits, or for Python's switch
            # interval, and keep the step from its beginning.
            self._gate.acquire(timeout=GO_FIRST_SECONDS)
        return step

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
        return self._thread.call(loop, function)

    # What follows runs on the runner's thread.

    def _load_unless_unwanted(self) -> RunnerInfo:
        with interruptible(self._is_unwanted):
            self._executor = self._load()
        import torch  # it is loaded by now

        self._inference_mode = torch.inference_mode()  # for the life of the thread
        self._inference_mode.__enter__()
        return self._executor.info

    def _load(self) -> "StepExecutor":
        from aioserve.runner.cpu.load import load_on_cpu

        return load_on_cpu(self._config, self._model_info, self.grammars)

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self._executor is None:
            raise RunnerDeadError("the model runner was not loaded")
        self._executor.lets_go = self._open_gate
        return self._executor.execute_in_mode(scheduler_output)

    def _close(self) -> None:
        if self._inference_mode is not None:
            self._inference_mode.__exit__(None, None, None)
        if self._executor is not None:
            self._executor.close()
            self._executor = None


def _open(gate: threading.Lock) -> None:
    if gate.locked():
        gate.release()


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


# The executor of one thread. A step passes through it twice, out and back, while nothing is
# computed: so it is a queue in C, and the result goes straight to the future on the event loop.


class OneThread(Executor):
    """An executor of one thread, which does one call after another, in the order in which they
    come.

    The thread starts with the first call. It ends after `shutdown`, with the executor, or when
    Python ends; whatever it was given before is done first.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[partial[None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_shut_down = False
        self._lock = threading.Lock()

    def call(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[], T]
    ) -> "asyncio.Future[T]":
        """Return a future of `loop` for what `function` returns or raises. To be called on the
        thread of the loop. A call whose future is cancelled before its turn is left out.

        `loop.run_in_executor` does the same with the future of `submit` in between, whose result it
        hands on: that takes about twice as long.
        """
        future: asyncio.Future[T] = loop.create_future()
        self._put(partial(_answer, future, function))
        return future

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()
        self._put(partial(_do, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do as `Executor.shutdown`; with `cancel_futures` on the thread of the calls' loop."""
        with self._lock:
            self._is_shut_down = True
            if cancel_futures:
                with suppress(Empty):
                    while (work := self._work.get_nowait()) is not None:
                        work.args[0].cancel()
            self._work.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _put(self, work: "partial[None]") -> None:
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the executor takes no calls after shutdown()")
            if self._thread is None:
                self._thread = self._start()
            self._work.put(work)

    def _start(self) -> threading.Thread:
        # A daemon: Python would wait for any other before it calls `_end_threads`, which ends it.
        # It knows the queue alone: an executor that is dropped ends its thread.
        thread = threading.Thread(target=_do_all, args=(self._work,), name=self._name, daemon=True)
        weakref.finalize(self, self._work.put, None).atexit = False
        _threads[thread] = self._work
        thread.start()
        return thread


#: The threads that live, and what each is given.
_threads: "weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[partial[None] | None]]"
_threads = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """Let each thread do what it was given, and end it, while Python can still run them."""
    threads = list(_threads.items())
    for _, work in threads:
        work.put(None)
    for thread, _ in threads:
        thread.join()


def _do_all(work: "SimpleQueue[partial[None] | None]") -> None:
    while _do_next(work):
        pass


def _do_next(work: "SimpleQueue[partial[None] | None]") -> bool:
    """Return whether there was another one. Holds nothing of a call that is done."""
    if (call := work.get()) is None:
        return False
    call()
    return True


def _do(future: "Future[T]", function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
        del future  # which the traceback of its own error would keep
    else:
        future.set_result(result)


def _answer(future: "asyncio.Future[T]", function: Callable[[], T]) -> None:
    if future.cancelled():
        return
    try:
        result = function()
    except BaseException as error:
        _tell(future, None, error)
        del future  # which the traceback of its own error would keep
    else:
        _tell(future, result, None)


def _tell(future: "asyncio.Future[Any]", result: object, error: BaseException | None) -> None:
    try:  # each step comes by here: `suppress` would take three calls more
        future.get_loop().call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:
        return  # the loop is closed: nothing waits there any more


def _settle(future: "asyncio.Future[Any]", result: object, error: BaseException | None) -> None:
    if future.done():
        return  # it was cancelled meanwhile
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # no future takes one, and its reader would hang
        future.set_exception(RuntimeError(f"a call on a thread raised {error!r}"))
    else:
        future.set_exception(error)
