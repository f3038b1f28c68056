"""The public Python API: an engine that lives in the caller's event loop.

Guards the door and owns the engine task; `builder` knows what it is made of. Installs no signal
handlers, opens no ports; starts no processes but those that render chat templates.
"""

import asyncio
import logging
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from types import TracebackType
from typing import Self

from aioserve.config import EngineConfig
from aioserve.engine.builder import EngineBuilder, EngineParts
from aioserve.engine.clock import is_real
from aioserve.engine.core import EngineCore, EngineLoop
from aioserve.engine.operated_engine import OperatedEngine
from aioserve.engine.stream import Origin, RequestStream, Samples, SampleState
from aioserve.engine.watchdog import Watchdog
from aioserve.errors import EngineDeadError, EngineStartError, ForeignLoopError, RunnerDeadError
from aioserve.kv_cache import KVEvent
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.runner.info import RunnerInfo
from aioserve.runner.interface import RunnerInterface, load_runner

logger = logging.getLogger(__name__)


class AsyncEngine(OperatedEngine):
    """Serves requests from any number of tasks of one event loop.

    async with AsyncEngine(EngineConfig()) as engine:
        async for output in engine.generate("Who's there?", SamplingParams(max_tokens=32)):
            print(output.text, end="")
    """

    # Here, since `__del__` reads them of an engine whose settings were refused, too.
    _watchdog: Watchdog | None = None  # between start and shutdown, in real time
    _home: tuple[asyncio.AbstractEventLoop, int] | None = None  # the loop, and its thread

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        runner: RunnerInterface | None = None,
        on_kv_event: Callable[[KVEvent], None] | None = None,
    ) -> None:
        """Cheap; `start` does the work. `runner` replaces the one that the config names;
        `on_kv_event` is called, between steps, with what became findable in the KV cache or was
        lost; if it raises, that is logged and the engine goes on.
        """
        super().__init__(config)
        self._runner = runner
        self._on_kv_event = on_kv_event
        self._is_real_time = False  # known after start
        self._hang: RunnerDeadError | None = None  # a step that counts as dead
        self._start_is_over: asyncio.Event | None = None  # None: there was none
        self._ending = asyncio.Lock()  # held by the `shutdown` that gives everything back
        self._num_clients = 0  # besides those of this process

    async def start(self) -> None:
        """Load the model and start the engine task: once in its life.

        Raises `ConfigError` if that cannot work, and `EngineStartError` for a second call, one
        after `shutdown`, or if `shutdown` is called meanwhile.
        """
        if self._is_closing:
            raise EngineStartError("start() after shutdown(): make another engine")
        if self._start_is_over is not None:
            raise EngineStartError("start() was called before: make another engine for a new start")
        self._start_is_over = asyncio.Event()
        self._home = asyncio.get_running_loop(), threading.get_ident()
        try:
            await self._start()
        finally:
            self._start_is_over.set()

    async def _start(self) -> None:
        builder = EngineBuilder(self.config, self.model_info, self._runner, self.metrics)
        self._runner = builder.runner
        self._adapters, self._builder = builder.adapters, builder
        try:
            if told := str(self.sampling_defaults):  # which also refuses values that make no sense
                logger.info(
                    "requests that do not state it are sampled as the model recommends: %s "
                    "(model.generation_config)",
                    told,
                )
            runner_info = await load_runner(self._runner)
            if self._is_closing:
                raise EngineStartError("shutdown() was called meanwhile")
            await self._adapters.load_configured()
            parts = builder.build(runner_info, self._on_kv_event)
        except BaseException:
            await builder.close()
            raise
        self.config = builder.config
        self._parts, self.max_model_len = parts, parts.max_model_len
        self._task = asyncio.create_task(parts.core.run(), name="aioserve-engine")
        self._task.add_done_callback(lambda task: self._on_task_done(task, parts))
        self._is_real_time = is_real(parts.clock)
        if self._is_real_time:
            self._watchdog = _watch(self, parts.core)

    def end_process_with_loop(self, end: Callable[[str], None]) -> None:
        """Call `end`, on another thread and with what has happened, when the event loop has stood
        still for `server.dead_loop_seconds`: for servers, whose loop and process are their own.
        Where a C function holds the interpreter's lock, no thread can call it: the process is then
        ended by SIGALRM, with its stacks on stderr. Does nothing before the start.
        """
        if self._watchdog is not None:
            self._watchdog.end_process_with_loop(end)

    def _give_up_step(self, why: str) -> None:
        """Give up a step that hangs: the engine dies, and the runner's thread is left alone."""
        if self._task is not None and not self._task.done():
            self._hang = RunnerDeadError(f"{why} (server.dead_step_seconds)")
            self._task.cancel()

    def abort(self, request_id: str) -> bool:
        self._check_place()
        parts = self._parts
        if parts is None or self._error is not None:
            return False
        return self._abort_if_here(request_id, parts)

    async def wait_ended(self) -> None:
        """Return once `shutdown` has ended the engine task; raises `EngineDeadError` if it dies."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        if self._error is not None:
            raise EngineDeadError(f"the engine has died: {self._error}") from self._error

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain_timeout` s, abort the rest.

        Idempotent. Streams that are aborted end with finish reason `abort`. During a start it waits
        until what is being loaded can be given back.
        """
        self._is_closing = True
        if self._start_is_over is not None:
            await self._start_is_over.wait()
        if self._gallery is not None:
            self._gallery.close()
        if self._adapters is not None:
            await self._adapters.close()
        if self._parts is not None and self._task is not None:
            await self._drain(self._parts, drain_timeout)
            self._task.cancel()
            if not self._task.done():  # else its event loop may be closed
                await asyncio.wait([self._task])
        self._pulse.stop()
        if self._watchdog is not None:
            self._watchdog.close()
        async with self._ending:
            if self._parts is not None:
                parts, self._parts = self._parts, None
                await parts.close()
            if self._hang is not None:
                logger.error("the runner is not closed: its thread is still at the step that hangs")
            elif self._runner is not None:
                await self._runner.close()

    def __del__(self) -> None:
        """An engine that is dropped without `shutdown` leaves no thread and no process behind: they
        end with what they work for. In a loop that still turns, Python warns of it.
        """
        if self._watchdog is None or self._home is None:
            return
        self._watchdog.close()
        if not (self._is_closing or self._home[0].is_closed()):
            warnings.warn(
                f"{self!r} is dropped without shutdown()", ResourceWarning, 1, source=self
            )

    async def _drain(self, parts: EngineParts, seconds: float) -> None:
        if parts.shadow_turns is not None:
            parts.shadow_turns.close()
        deadline = parts.clock() + seconds
        # Polled: it happens once in a life, which an event of its own would not be worth.
        while (  # noqa: ASYNC110
            self._error is None
            and len(parts.output_processor)
            and parts.clock() < deadline
            and (self._control is None or self._control.let_go())
        ):
            await asyncio.sleep(0.01)
        if self._error is None:
            self._end(None, parts)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    def _alive(self) -> EngineParts:
        """The parts that serve requests. Raises `EngineDeadError` if that is not the time, and
        `ForeignLoopError` if this is not the place.
        """
        self._check_place()
        if self._error is not None:
            raise EngineDeadError(f"the engine has died: {self._error}") from self._error
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down")
        if self._parts is None:
            raise EngineDeadError("the engine has not been started")
        return self._parts

    def _check_place(self) -> None:
        """Events of one loop wake nothing in another: a call would wait there for ever."""
        if self._home is None or self._error is not None:
            return
        loop, thread = self._home
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if threading.get_ident() != thread or here not in (None, loop):
            raise ForeignLoopError(
                "the engine was called from another "
                f"{'thread' if threading.get_ident() != thread else 'event loop'} than the one "
                "that it was started in: await it there, or hand the call over with "
                "asyncio.run_coroutine_threadsafe(call, loop)"
            )

    # What follows is for front ends in other processes.

    @property
    def runner_info(self) -> RunnerInfo:
        """What the runner can do and has room for. Raises `EngineDeadError` before the start and
        after the end.
        """
        return self._alive().runner_info

    def connect(self, send_off: Callable[[], None]) -> int:
        """A number for a new client; `send_off` is called when a step's outputs were delivered to
        its requests. Raises `EngineDeadError` before the start and after the end.
        """
        if self._parts is None:
            raise EngineDeadError("there is no engine to connect to")
        self._num_clients += 1
        self._parts.delivery.send_off[self._num_clients] = send_off
        return self._num_clients

    def disconnect(self, client_index: int) -> None:
        """Remove a client that has left; the caller drops its requests."""
        if self._parts is not None:
            del self._parts.delivery.send_off[client_index]

    async def accept(
        self,
        spec: RequestSpec,
        adapter: str,
        seconds: float | None,
        make_state: Callable[[Request, Samples], SampleState],
        origin: Origin,
    ) -> Samples:
        """As `add_request`, of one that was tokenized and checked elsewhere; what `make_state`
        makes of its samples gets their outputs.
        """
        parts = self._alive()

        def register(request: Request, index: int) -> None:
            parts.output_processor.add(make_state(request, samples))

        num_tokens, n = len(spec.prompt_token_ids), spec.sampling_params.n
        with self._claimed(spec.request_id, n, parts) as samples, self._arriving(num_tokens, parts):
            samples.origin = origin
            await self._enter(spec, samples, adapter, seconds, register, parts)
        return samples

    def drop(self, samples: Samples) -> None:
        """Abort the samples of a request whose reader has left."""
        if self._parts is not None:
            self._drop(samples, self._parts)

    def end_stopped(self, num_tokens: Mapping[str, int]) -> None:
        """End samples in whose last token their reader found a stop string; `num_tokens` by id."""
        if self._parts is not None and self._error is None:
            parts = self._parts
            ended = parts.output_processor.end_stopped(num_tokens, parts.clock())
            parts.core.finish_requests(ended, RequestStatus.FINISHED_STOPPED)

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Inside the block one more request counts as waiting. Raises `EngineOverloadedError`."""
        with self._arriving(1, self._alive()):
            yield

    def enter_queue(self) -> Callable[[], None]:
        """Count one more request as waiting, as `arriving` does; return what ends that. Raises
        `EngineOverloadedError`.
        """
        entered = ExitStack()
        entered.enter_context(self._arriving(1, self._alive()))
        return entered.close

    def _arriving(self, num_tokens: int, parts: EngineParts) -> AbstractContextManager[None]:
        if self._control is not None:
            self._control.check_arrival()
        return parts.arrivals.counted(num_tokens)

    async def _submit(
        self,
        spec: RequestSpec,
        samples: Samples,
        stream: RequestStream,
        adapter: str,
        seconds: float | None,
        parts: EngineParts,
    ) -> None:
        def register(request: Request, index: int) -> None:
            parts.output_processor.add_request(request, samples, index, stream)

        await self._enter(spec, samples, adapter, seconds, register, parts)

    async def _enter(
        self,
        spec: RequestSpec,
        samples: Samples,
        adapter: str,
        seconds: float | None,
        register: Callable[[Request, int], None],
        parts: EngineParts,
    ) -> None:
        spec = await parts.arrivals.prepare(spec, samples, adapter, seconds)
        self._alive()
        if self._control is not None:
            self._control.check_arrival()  # a pause may have begun meanwhile
        parts.arrivals.enter(spec, samples, register)
        if self._is_real_time:
            self._pulse.start()

    def _abort(self, samples: Samples, parts: EngineParts) -> bool:
        return self._end(samples.ids, parts)

    def _drop(self, samples: Samples, parts: EngineParts) -> None:
        ids = parts.output_processor.drop(samples, parts.clock())
        if ids and self._parts is not None and self._error is None:
            parts.core.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def _on_task_done(self, task: asyncio.Task[None], parts: EngineParts) -> None:
        """End every open stream with the error: no client may wait for a dead task."""
        if not task.cancelled():
            self._error = task.exception()
        elif self._hang is not None:
            self._error = self._hang
        elif self._is_closing:
            return
        else:
            self._error = EngineDeadError(
                "the engine task was cancelled: by the end of the event loop that the engine was "
                "started in, as asyncio.run() leaves it, or by other code; start it where it is "
                "awaited, and end it with shutdown()"
            )
        logger.critical("the engine has died", exc_info=self._error)
        error = EngineDeadError(f"the engine has died: {self._error}")
        error.__cause__ = self._error
        parts.output_processor.fail_requests(None, error, parts.clock())


def _watch(engine: AsyncEngine, core: EngineCore) -> Watchdog:
    """A watchdog whose thread keeps neither alive: an engine that is dropped ends its thread."""
    engine_ref, core_ref = weakref.ref(engine), weakref.ref(core)

    def loop() -> EngineLoop:
        if (found := core_ref()) is None:
            raise RuntimeError("the engine is gone")
        return found.loop

    def step_since() -> float | None:
        return None if (found := core_ref()) is None else found.step_since

    def give_up_step(why: str) -> None:
        if (found := engine_ref()) is not None:
            found._give_up_step(why)

    return Watchdog(
        engine.config.server,
        lambda: loop().scheduler.policy,
        step_since,
        lambda: loop().scheduler.has_requests(),
        give_up_step,
    )
