"""The public Python API: an engine that lives in the caller's event loop.

`AsyncEngine` guards the door and owns the engine task; `builder` knows what it is made of. Installs
no signal handlers, opens no ports; starts no processes but those that render chat templates.
`EngineInternals` is for the rest of aioserve.
"""

import asyncio
import logging
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from aioserve.config import EngineConfig, SchedulerConfig
from aioserve.engine.builder import EngineBuilder, EngineParts, check_asked
from aioserve.engine.client import EngineClient
from aioserve.engine.clock import is_real
from aioserve.engine.core import EngineCore, EngineLoop
from aioserve.engine.metrics import EngineMetrics, MetricsText, Sources
from aioserve.engine.stream import Origin, RequestStream, Samples, SampleState
from aioserve.errors import EngineDeadError, EngineStartError, ForeignLoopError, RunnerDeadError
from aioserve.kv_cache import KVEvent
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import FinishReason, SchedulerStats
from aioserve.request import Request, RequestSpec, RequestStatus, WaitReason
from aioserve.runner.interface import RunnerInfo, RunnerInterface, load_runner
from aioserve.scheduler import FALLBACK_POLICY, load_policy
from aioserve.support.parts import load

if TYPE_CHECKING:
    from aioserve.engine.adapters import Adapters
    from aioserve.engine.control import Control
    from aioserve.engine.live_feed import LiveFeed
    from aioserve.engine.operations.command import (
        Answer,
        Arrivals,
        Counted,
        EngineCommand,
        Health,
        Report,
        Running,
        Seen,
        State,
    )
    from aioserve.engine.snapshot import EngineSnapshot
    from aioserve.engine.watchdog import LoopMonitor, Watchdog

logger = logging.getLogger(__name__)


class AsyncEngine(EngineClient):
    """An engine that serves requests from any number of tasks of one event loop.

    async with AsyncEngine(EngineConfig()) as engine:
        async for output in engine.generate("Who's there?", SamplingParams(max_tokens=32)):
            print(output.text, end="")
    """

    # Here, since `__del__` reads them of an engine whose settings were refused, too.
    _watchdog: "Watchdog | None" = None  # between start and shutdown, in real time
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
        self.config = config or EngineConfig()
        self.model_info = ModelInfo(self.config.model)
        self.started_at = int(time.time())
        self.max_model_len = 0  # known after start: the setting, or what the KV pool can hold
        sources = Sources(
            self.get_stats,
            self._get_wait_reasons,
            lambda: 0 if self._parts is None else self._parts.core.loop.failures.count,
            lambda: self.replaced_policy_error is not None,
            lambda: None if self._runner is None else self._runner.num_compute_threads,
            self._settings_as_labels,
            lambda: self.state,
        )
        self.metrics = EngineMetrics(sources, _expose)
        #: What servers, workers and commands ask of an engine, and programs need not.
        self.internals = EngineInternals(self)
        self._runner = runner
        self._on_kv_event = on_kv_event
        self._parts: EngineParts | None = None  # between start and shutdown
        self._builder: EngineBuilder | None = None  # it and `_task`: from the start on
        self._task: asyncio.Task[None] | None = None
        self._control: Control | None = None  # from its first use on
        self._controlling: set[asyncio.Task[None]] = set()  # commands that are not done
        self._is_real_time = False  # known after start
        self._start_is_over: asyncio.Event | None = None  # None: there was none
        self._is_closing = False
        self._ending = asyncio.Lock()  # held by the `shutdown` that gives everything back
        self._hang: RunnerDeadError | None = None  # a step that counts as dead
        self._error: BaseException | None = None  # what killed the engine

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
        self._builder = builder
        try:
            # This also refuses values that make no sense.
            if told := str(self.model_info.sampling_defaults):
                logger.info(
                    "requests that do not state it are sampled as the model recommends: %s "
                    "(model.generation_config)",
                    told,
                )
            runner_info = await load_runner(self._runner)
            if self._is_closing:
                raise EngineStartError("shutdown() was called meanwhile")
            if self.config.adapters.lora:
                await builder.adapters.load_configured()
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

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain_timeout` s, abort the rest.

        Idempotent. Streams that are aborted end with finish reason `abort`. During a start it waits
        until what is being loaded can be given back.
        """
        self._is_closing = True
        if self._start_is_over is not None:
            await self._start_is_over.wait()
        self.internals.close()
        if self._builder is not None:
            await self._builder.close_adapters()
        try:
            if self._parts is not None and self._task is not None:
                await self._drain(self._parts, drain_timeout)
                self._task.cancel()
                if not self._task.done():  # else its event loop may be closed
                    await asyncio.wait([self._task])
        finally:
            self._close_chat_format()  # chats that were accepted have ended, or are given up
            if self._watchdog is not None:
                self.internals.loop_monitor.stop()
                self._watchdog.close()
        async with self._ending:
            if self._parts is not None:
                parts, self._parts = self._parts, None
                await parts.close()
            if self._hang is not None:
                logger.error("the runner is not closed: its thread is still at the step that hangs")
            elif self._runner is not None:
                await self._runner.close()

    async def wait_ended(self) -> None:
        """Return once `shutdown` has ended the engine task; raises `EngineDeadError` if it dies."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        if self._error is not None:
            raise EngineDeadError(f"the engine has died: {self._error}") from self._error

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

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Inside the block one more request counts as waiting. Raises `EngineOverloadedError`."""
        with self._arriving(1):
            yield

    def abort_now(self, request_id: str) -> bool:
        self._check_place()
        parts = self._parts
        if parts is None or self._error is not None:
            return False
        return self._abort_if_here(request_id, parts.claims)

    @property
    def errored(self) -> BaseException | None:
        """The error that killed the engine; None while it lives."""
        return self._error

    @property
    def policy_error(self) -> Exception | None:
        """The error of the policy, if it has run no step since, not in ten seconds; else None.

        Requests of its step failed with this error; the engine goes on, and asks it again.
        """
        from aioserve.engine.status import policy_error_of

        return policy_error_of(self._parts)

    @property
    def replaced_policy_error(self) -> Exception | None:
        """The error of the policy for which a plain one, first come first served, plans in its
        place until `switch_policy`; None: the policy that is set plans.
        """
        return None if self._parts is None else self._parts.core.loop.failures.replaced_after

    @property
    def state(self) -> "State":
        """Whether the engine runs, is paused or sleeps, by an operator's command."""
        return "running" if self._control is None else self._control.state

    def health(self) -> "Health":
        """Return whether a new request would be served now, and if not, why."""
        from aioserve.engine.operations.command import Health
        from aioserve.engine.status import health_of

        if (error := self._error) is not None:
            return Health("dead", f"{type(error).__name__}: {error}")
        if self._is_closing:
            return Health("draining", "the server is shutting down")
        if (parts := self._parts) is None:
            return Health("loading", "the model is being loaded")
        if self.state != "running":
            return Health(self.state, "an operator wants it so")
        return health_of(parts, self.config)

    def get_stats(self) -> SchedulerStats | None:
        """Return the scheduler's state and totals; None before the start and after the end."""
        return None if self._parts is None else self._parts.core.loop.scheduler.make_stats()

    def inspect(self) -> "EngineSnapshot | None":
        """Return what it is doing now: every request and why it waits, steps in flight, what memory
        is held. None before the start and after the end.
        """
        from aioserve.engine.snapshot import take_snapshot

        if (parts := self._parts) is None:
            return None
        is_fallback = parts.core.loop.failures.replaced_after is not None
        policy = FALLBACK_POLICY if is_fallback else self.config.scheduler.policy
        return take_snapshot(parts, policy, self.state, is_fallback=is_fallback)

    @property
    def adapters(self) -> "Adapters":
        """The LoRA adapters: ask for them, load and unload them. There are none before a start:
        raises `EngineDeadError`.
        """
        if self._builder is None:
            raise EngineDeadError("the engine has not been started")
        return self._builder.adapters

    async def ask(self, command: "EngineCommand[Answer]") -> "Answer":
        return await command.run_on(self)

    def switch_policy(self, policy: str, options: dict[str, Any] | None = None) -> None:
        """Change the policy between two steps; queue, running requests and KV cache stay.

        Raises `ConfigError` for a policy, option or limit that cannot work, and `PolicyError` if
        the new policy cannot order the requests that are there. The old one goes on then.
        """
        parts = self._alive()
        settings = msgspec.structs.replace(
            self.config.scheduler, policy=policy, options=options or {}
        )
        check_asked(load_policy(policy), parts.runner_info)
        parts.core.loop.switch(settings)
        self.config = msgspec.structs.replace(self.config, scheduler=settings)
        logger.info("policy is now %s %s", policy, options or {})

    def switch_shadow(self, policy: str | None, options: dict[str, Any] | None = None) -> None:
        """Have another policy evaluated on the traffic from now on, or none. Raises `ConfigError`;
        what there was goes on then.
        """
        parts = self._alive()
        shadow = msgspec.structs.replace(
            self.config.shadow, shadow_policy=policy, shadow_options=options or {}
        )
        config = msgspec.structs.replace(self.config, shadow=shadow)
        assert self._builder is not None
        turns = self._builder.shadows.follow(
            parts.core.loop, config, parts.runner_info, parts.max_model_len, parts.shadow_turns
        )
        self.config, self._parts = config, parts._replace(shadow_turns=turns)
        logger.info("shadow policy is now %s %s", policy, options or {})

    async def pause(self, *, running: "Running" = "keep", arrivals: "Arrivals" = "wait") -> None:
        """Return when no step is computed, and none will be until `resume`.

        `running`: what becomes of requests that run or wait; kept ones go on with the same tokens.
        `arrivals`: whether those that come meanwhile wait, in the queue and its limits, or get
        `EnginePausedError`. Deadlines and queue timeouts pass.
        """
        await self._controlled(self._controls().pause(running, arrivals))

    async def resume(self) -> None:
        """End a pause. Does nothing while the engine runs. Raises `ConfigError` while it sleeps."""
        await self._controlled(self._controls().resume())

    async def sleep(
        self, *, weights: bool = False, running: "Running" = "keep", arrivals: "Arrivals" = "wait"
    ) -> None:
        """Pause and free the memory of the KV cache, with `weights` that of the model as
        well. Kept requests are computed again after `wake`. Raises `ConfigError` where that is not
        served: on a CUDA device; nothing has changed then.
        """
        await self._controlled(self._controls().sleep(running, arrivals, frees_weights=weights))

    async def wake(self) -> None:
        """Allocate what `sleep` freed, and go on. Raises `ConfigError`; it sleeps on then."""
        await self._controlled(self._controls().wake())

    async def reload(self, path: str, *, running: "Running" = "keep") -> None:
        """Serve the weights of a model directory which is the same but for them; cached prefixes
        are forgotten. Kept requests go on after their tokens so far. Raises `ConfigError` if they
        cannot be read, are of another model, or have no room; the old weights serve on then. On a
        CPU there must be room for both; a CUDA device frees the old weights first, and loads them
        again if the new ones cannot be loaded.
        """
        await self._controlled(self._controls().reload(path, running))

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; True if the KV cache is now empty."""
        parts = self._alive()
        is_empty = parts.core.loop.scheduler.reset_prefix_cache()
        if parts.kv_events is not None:
            parts.kv_events.deliver()
        return is_empty

    # The way of a request, and the life of the engine task.

    def _alive(self) -> EngineParts:
        """Return the parts that serve requests. Raises `EngineDeadError` if that is not the time,
        and `ForeignLoopError` if this is not the place.
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
        if here is loop:  # which runs in its thread alone
            return
        if threading.get_ident() != thread or here not in (None, loop):
            raise ForeignLoopError(
                "the engine was called from another "
                f"{'thread' if threading.get_ident() != thread else 'event loop'} than the one "
                "that it was started in: await it there, or hand the call over with "
                "asyncio.run_coroutine_threadsafe(call, loop)"
            )

    def _arriving(self, num_tokens: int) -> AbstractContextManager[None]:
        if self._control is not None:
            self._control.check_arrival()
        return self._alive().arrivals.counted(num_tokens)

    async def _submit(
        self,
        spec: RequestSpec,
        samples: Samples,
        stream: RequestStream,
        adapter: str,
        seconds: float | None,
    ) -> None:
        parts = self._parts or self._alive()  # `_enter` asks again

        def register(request: Request, index: int) -> None:
            parts.output_processor.add_request(request, samples, index, stream)

        await self._enter(spec, samples, adapter, seconds, register)

    async def _enter(
        self,
        spec: RequestSpec,
        samples: Samples,
        adapter: str,
        seconds: float | None,
        register: Callable[[Request, int], None],
    ) -> None:
        parts = self._parts or self._alive()
        spec = await parts.arrivals.prepare(spec, samples, adapter, seconds)
        self._alive()
        if self._control is not None:
            self._control.check_arrival()  # a pause may have begun meanwhile
        parts.arrivals.enter(spec, samples, register)
        if self._is_real_time:
            self.internals.loop_monitor.start()

    def _abort(self, samples: Samples) -> bool:
        return self._parts is not None and self._end(samples.ids, self._parts)

    def _drop(self, samples: Samples) -> None:
        if (parts := self._parts) is None:
            return  # all requests have ended
        ids = parts.output_processor.drop(samples, parts.clock())
        if ids and self._error is None:
            parts.core.loop.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def _controls(self) -> "Control":
        from aioserve.engine.control import Control

        parts = self._alive()
        if self._control is None:
            assert self._runner is not None
            self._control = Control(
                self.config, parts.core, self._runner, self.adapters, lambda: self._end(None, parts)
            )
        return self._control

    async def _controlled(self, command: Coroutine[Any, Any, None]) -> None:
        """Wait for it, but not for an engine that has ended: raises `EngineDeadError` then. It is
        done whole, also if its caller leaves.
        """
        assert self._task is not None
        task = asyncio.create_task(command)
        self._controlling.add(task)
        task.add_done_callback(self._forget_command)
        await asyncio.wait({task, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self._alive()
        await task

    def _forget_command(self, task: asyncio.Task[None]) -> None:
        self._controlling.remove(task)
        if not task.cancelled():
            task.exception()  # the caller may have left

    def _end(self, request_ids: list[str] | None, parts: EngineParts) -> bool:
        """Abort requests, all if None; returns whether any really ended by this call."""
        ended = parts.core.loop.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        parts.output_processor.end_requests(ended, FinishReason.ABORT, parts.clock())
        return bool(ended)

    def _get_wait_reasons(self) -> Counter[WaitReason]:
        parts = self._parts
        return Counter(
            () if parts is None else parts.core.loop.scheduler.get_wait_reasons().values()
        )

    def _settings_as_labels(self) -> Mapping[str, Mapping[str, str]]:
        from aioserve.engine.status import settings_as_labels

        return settings_as_labels(self.config, self.max_model_len, self._parts, self.metrics)

    def _give_up_step(self, why: str) -> None:
        """Give up a step that hangs: the engine dies, and the runner's thread is left alone."""
        if self._task is not None and not self._task.done():
            self._hang = RunnerDeadError(f"{why} (server.dead_step_seconds)")
            self._task.cancel()

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


def _expose(metrics: EngineMetrics) -> MetricsText:
    from aioserve.engine.exposition import Exposition

    return Exposition(metrics)


def _watch(engine: AsyncEngine, core: EngineCore) -> "Watchdog":
    """Return a watchdog whose thread keeps neither alive: an engine that is dropped ends its
    thread. Simulated time needs none, and does not load it.
    """
    from aioserve.engine.watchdog import Watchdog

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


class PolicyTrials(Protocol):
    """Comparisons of policies on the requests that come."""

    async def try_policy(
        self, settings: SchedulerConfig, seconds: float | None, num_requests: int | None
    ) -> "Report":
        """Record what comes, and compare what there is with `settings` on it."""

    def find(self, report_id: str) -> bytes | None:
        """Return a report, in HTML; None if it was never made, or is forgotten."""


class EngineInternals:
    """The methods of an engine of this process that programs do not need: those for servers,
    commands, and front ends in other processes.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._live_feed: LiveFeed | None = None  # once a page has asked for it
        self._trials: PolicyTrials | None = None  # once one was requested
        self._num_clients = 0  # besides those of this process

    @cached_property
    def loop_monitor(self) -> "LoopMonitor":
        """By how much the event loop is late while there are requests, in real time."""
        from aioserve.engine.watchdog import LoopMonitor, StateLog

        engine = self._engine
        return LoopMonitor(
            lambda: engine._parts is not None and len(engine._parts.output_processor) > 0,
            engine.metrics.loop_delays["engine"].observe,
            StateLog(engine.get_stats, engine.metrics).write,
        )

    def close(self) -> None:
        """End the live feed: the engine shuts down."""
        if self._live_feed is not None:
            self._live_feed.close()

    # For servers and commands.

    def end_process_with_loop(self, end: Callable[[str], None]) -> None:
        """Call `end`, on another thread and with what has happened, when the event loop has stood
        still for `server.dead_loop_seconds`: for servers, whose loop and process are their own.
        Where a C function holds the interpreter's lock, no thread can call it: the process is then
        ended by SIGALRM, with its stacks on stderr. Does nothing before the start.
        """
        if self._engine._watchdog is not None:
            self._engine._watchdog.end_process_with_loop(end)

    @property
    def first_policy_error(self) -> Exception | None:
        """The first thing that a policy did wrong since the start: figures of such a run are not
        those of the policy alone.
        """
        parts = self._engine._parts
        return None if parts is None else parts.core.loop.failures.first

    def render_metrics(self, counted: "list[Counted]") -> bytes:
        """Metrics as Prometheus text; `counted` adds what a server in this process has counted."""
        self._engine.metrics.loop_lags["engine"] = self.loop_monitor.worst()
        if counted:
            self._engine.metrics.counted["engine"] = counted
        return self._engine.metrics.render()

    @property
    def trials(self) -> PolicyTrials:
        """Comparisons of policies on the requests that come. Raises `EngineDeadError` before the
        start and after the end.
        """
        parts = self._engine._alive()
        if self._trials is None:
            engine = self._engine
            make = load("engine", "policy trials")
            # The settings are asked for each time: the policy may have changed.
            self._trials = make(
                parts.core.loop, parts.clock, lambda: engine.config, engine.max_model_len
            )
        return self._trials

    async def look(self, after: int) -> "Seen":
        """See `LiveFeed.look`. Raises `EngineDeadError` before the start and after the end."""
        parts = self._engine._alive()
        if self._live_feed is None:
            from aioserve.engine.live_feed import LiveFeed

            engine = self._engine
            self._live_feed = LiveFeed(
                parts.core.loop,
                parts.clock,
                engine.metrics,
                lambda: engine.config,
                engine.max_model_len,
            )
        return await self._live_feed.look(after)

    # For front ends in other processes.

    @property
    def runner_info(self) -> RunnerInfo:
        """What the runner can do and has room for. Raises `EngineDeadError` before the start and
        after the end.
        """
        return self._engine._alive().runner_info

    def connect(self, send_off: Callable[[], None]) -> int:
        """Return a number for a new client; `send_off` is called when a step's outputs were
        delivered to its requests. Raises `EngineDeadError` before the start and after the end.
        """
        if (parts := self._engine._parts) is None:
            raise EngineDeadError("there is no engine to connect to")
        self._num_clients += 1
        parts.delivery.send_off[self._num_clients] = send_off
        return self._num_clients

    def disconnect(self, client_index: int) -> None:
        """Remove a client that has left; the caller drops its requests."""
        if (parts := self._engine._parts) is not None:
            del parts.delivery.send_off[client_index]

    async def accept(
        self,
        spec: RequestSpec,
        adapter: str,
        seconds: float | None,
        make_state: Callable[[Request, Samples], SampleState],
        origin: Origin,
    ) -> Samples:
        """Add a request that was tokenized and checked elsewhere, as `add_request`; what
        `make_state` makes of its samples gets their outputs.
        """
        engine = self._engine
        parts = engine._alive()

        def register(request: Request, index: int) -> None:
            parts.output_processor.add(make_state(request, samples))

        num_tokens, n = len(spec.prompt_token_ids), spec.sampling_params.n
        claimed = engine._claimed(spec.request_id, n, parts.claims)
        with claimed as samples, engine._arriving(num_tokens):
            samples.origin = origin
            await engine._enter(spec, samples, adapter, seconds, register)
        return samples

    def drop(self, samples: Samples) -> None:
        """Abort the samples of a request whose reader has left."""
        self._engine._drop(samples)

    def end_stopped(self, num_tokens: Mapping[str, int]) -> None:
        """End samples in whose last token their reader found a stop string; `num_tokens` by id."""
        engine = self._engine
        if (parts := engine._parts) is not None and engine._error is None:
            ended = parts.output_processor.end_stopped(num_tokens, parts.clock())
            parts.core.loop.finish_requests(ended, RequestStatus.FINISHED_STOPPED)

    def enter_queue(self) -> Callable[[], None]:
        """Count one more request as waiting, as `arriving` does; return what ends that. Raises
        `EngineOverloadedError`.
        """
        entered = ExitStack()
        entered.enter_context(self._engine._arriving(1))
        return entered.close
