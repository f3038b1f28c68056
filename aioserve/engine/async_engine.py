"""The public Python API: an engine that lives in the caller's event loop.

Builds the parts, guards the door, and owns the engine task. Installs no signal handlers, opens no
ports, starts no processes.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import msgspec

from aioserve.config import EngineConfig, SchedulerConfig
from aioserve.engine.clock import clock_of
from aioserve.engine.core import EngineCore
from aioserve.engine.decision_log import recorded
from aioserve.engine.input_processor import InputProcessor, Prompt
from aioserve.engine.kv_events import KVEventRelay
from aioserve.engine.metrics import EngineMetrics
from aioserve.engine.output_processor import OutputProcessor, Samples
from aioserve.engine.request_log import RequestLog
from aioserve.engine.stream import RequestStream
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloadedError,
    EngineStartError,
    PolicyError,
    RequestError,
    RequestFailedError,
)
from aioserve.kv_cache import KVCacheManager, KVEvent
from aioserve.model_info import ModelInfo
from aioserve.output_file import check_writable
from aioserve.outputs import EngineCoreOutput, FinishReason, RequestOutput, SchedulerStats
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.runner.interface import RunnerInterface
from aioserve.sampling_params import SamplingParams
from aioserve.scheduler import BaseScheduler, SchedulerInterface, load_policy
from aioserve.scheduler.blame import blamed
from aioserve.watch.shadow import Shadow, ShadowedScheduler

logger = logging.getLogger(__name__)

# How often a shadow that is behind gets a slice of an engine that is idle. A guess.
SHADOW_TICK_SECONDS = 0.02

# A policy whose last step failed may work again for the next request, but only a request can show
# it. So long it counts as failing, in seconds: enough for whoever asks now and then. A guess.
POLICY_FAILURE_SECONDS = 10.0


# A client that is refused hears when to come again: not at once, and not so late that the server
# idles when its load was a peak. Guesses.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class AsyncEngine:
    """Serves requests from any number of tasks of one event loop.

    async with AsyncEngine(EngineConfig()) as engine:
        async for output in engine.generate("Who's there?", SamplingParams(max_tokens=32)):
            print(output.text, end="")
    """

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
        self.max_model_len = 0  # known after start: the setting, or what the KV pool can hold
        self.metrics = EngineMetrics(
            self.get_stats,
            self._get_wait_reasons,
            lambda: 0 if self._core is None else self._core.num_policy_failures,
            lambda: None if self._runner is None else self._runner.num_compute_threads,
        )
        self._runner = runner
        self._on_kv_event = on_kv_event
        self._kv_events: KVEventRelay | None = None
        self._request_log: RequestLog | None = None
        self._core: EngineCore | None = None
        self._task: asyncio.Task[None] | None = None
        self._shadow: Shadow | None = None
        self._shadow_timer: asyncio.TimerHandle | None = None
        self._error: BaseException | None = None
        self._start_is_over: asyncio.Event | None = None  # None: there was none
        self._is_closing = False
        self._num_arriving = 0  # being tokenized, in the thread for long prompts
        self._arriving_tokens = 0  # of these, at least

    @property
    def errored(self) -> BaseException | None:
        """What killed the engine; None while it lives."""
        return self._error

    @property
    def is_draining(self) -> bool:
        """Whether `shutdown` was called: new requests are refused."""
        return self._is_closing

    @property
    def policy_error(self) -> Exception | None:
        """What the policy did wrong, if it has run no step since, not in ten seconds; else None.

        Its requests failed with this error; the engine goes on, and asks it again for others.
        """
        failure = None if self._core is None else self._core.policy_failure
        if failure is None or self._clock() - failure[1] > POLICY_FAILURE_SECONDS:
            return None
        return failure[0]

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
        try:
            await self._start()
        finally:
            self._start_is_over.set()

    async def _start(self) -> None:
        policy = load_policy(self.config.scheduler.policy)
        if issubclass(policy, BaseScheduler):  # what is wrong is said before weights are loaded
            policy.parse_options(self.config.scheduler.options)
            policy.check_limits(self.config.scheduler, self.model_info.max_model_len)
        if self.config.shadow.shadow_policy is not None:
            self._shadow_settings()
        check_writable(self.config.scheduler.decision_log, "decision log")
        check_writable(self.config.server.request_log, "request log")
        if self._runner is None:
            self.config.check_effects()
            self._runner = make_runner(self.config, self.model_info)
        if self.config.scheduler.pipeline_depth is None:
            scheduler = msgspec.structs.replace(
                self.config.scheduler, pipeline_depth=self._runner.pipeline_depth
            )
            self.config = msgspec.structs.replace(self.config, scheduler=scheduler)
        if self.config.server.request_log is not None:
            now = clock_of(asyncio.get_running_loop())()
            self._request_log = RequestLog(self.config.server.request_log, now)
        try:
            await self._runner.load()
            if self._is_closing:
                raise EngineStartError("shutdown() was called meanwhile")
            self._build(policy, self._runner)
        except BaseException:
            if self._request_log is not None:
                self._request_log.close()
            await self._runner.close()
            raise

    def _build(self, policy: type[SchedulerInterface], runner: RunnerInterface) -> None:
        cache = self.config.cache
        kv_cache = KVCacheManager(
            runner.num_kv_blocks,
            cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            watermark=cache.watermark,
            record_events=self._on_kv_event is not None,
        )
        if self._on_kv_event is not None:
            self._kv_events = KVEventRelay(
                kv_cache, self._on_kv_event, lambda error: self._log_failure("on_kv_event", error)
            )
        self.max_model_len = self._fit_max_model_len(kv_cache.num_slots)
        self._clock = clock_of(asyncio.get_running_loop())
        # A policy that implements the interface without BaseScheduler is built the same way.
        make_scheduler: Callable[..., SchedulerInterface] = policy
        if self.config.scheduler.decision_log is not None:
            make_scheduler = recorded(policy)
        with blamed(policy, "__init__()"):
            scheduler = make_scheduler(
                self.config.scheduler,
                kv_cache,
                max_model_len=self.max_model_len,
                clock=self._clock,
            )
        if self.config.shadow.shadow_policy is not None:
            scheduler = self._watched(scheduler, kv_cache.pool.num_blocks)
        self._input_processor = InputProcessor(
            self.model_info, self.max_model_len, self.config.runner.seed
        )
        skips_tokenizer = self.config.model.skip_tokenizer_init
        self._output_processor = OutputProcessor(
            None if skips_tokenizer else self.model_info.tokenizer, self.metrics, self._request_log
        )
        self._core = EngineCore(
            scheduler,
            runner,
            pipeline_depth=self.config.scheduler.depth,
            stall_timeout=self.config.scheduler.stall_timeout,
            clock=self._clock,
            deliver=self._deliver,
            expire=self._expire,
            fail=self._fail,
            after_step=self._tell_kv_events,
        )
        self._task = asyncio.create_task(self._core.run(), name="aioserve-engine")
        self._task.add_done_callback(self._on_task_done)

    def _watched(self, live: SchedulerInterface, num_kv_blocks: int) -> SchedulerInterface:
        """The live scheduler with a shadow behind it."""
        cache, settings = self.config.cache, self._shadow_settings()
        policy = load_policy(settings.policy)
        assert issubclass(policy, BaseScheduler)

        def make_scheduler(clock: Callable[[], float]) -> BaseScheduler:
            kv_cache = KVCacheManager(
                num_kv_blocks,
                cache.block_size,
                enable_prefix_caching=cache.enable_prefix_caching,
                watermark=cache.watermark,
            )
            with blamed(policy, "__init__()"):
                return policy(settings, kv_cache, max_model_len=self.max_model_len, clock=clock)

        self._shadow = Shadow(
            make_scheduler, self.metrics.shadow, max_share=self.config.shadow.shadow_max_share
        )
        self.metrics.shadow.shadow = self._shadow
        return ShadowedScheduler(live, self._shadow, self._clock)

    def _shadow_settings(self) -> SchedulerConfig:
        """The live settings with the shadow's policy. Raises `ConfigError`."""
        shadow = self.config.shadow
        assert shadow.shadow_policy is not None
        settings = msgspec.structs.replace(
            self.config.scheduler,
            policy=shadow.shadow_policy,
            options=shadow.shadow_options,
            decision_log=None,
        )
        policy = load_policy(settings.policy)
        if not issubclass(policy, BaseScheduler):
            raise ConfigError(f"shadow policy {settings.policy!r} must derive from BaseScheduler")
        policy.parse_options(settings.options)
        policy.check_limits(settings, self.model_info.max_model_len)
        return settings

    def _advance_shadow(self, *, is_tick: bool = False) -> None:
        """Its turn while a step computes; and from a timer, while it is behind an idle engine."""
        if self._shadow is None or self._is_closing:
            return
        self._shadow.advance(self._clock())
        if is_tick or self._shadow_timer is None:
            self._shadow_timer = None
            if self._shadow.has_work:
                self._shadow_timer = asyncio.get_running_loop().call_later(
                    SHADOW_TICK_SECONDS, lambda: self._advance_shadow(is_tick=True)
                )

    def _fit_max_model_len(self, num_slots: int) -> int:
        """Every request that is accepted must be able to run alone in the KV pool."""
        max_model_len = self.model_info.max_model_len
        if max_model_len - 1 <= num_slots:
            return max_model_len
        if self.config.model.max_model_len is not None:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but the KV cache holds {num_slots} tokens: "
                "lower max_model_len or raise kv_cache_gib (or num_kv_blocks)"
            )
        logger.warning(
            "the KV cache holds %d tokens: serving at most that many per request, not the model's "
            "%d (raise kv_cache_gib for more)",
            num_slots,
            max_model_len,
        )
        return num_slots

    async def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of the request, not of this call
        cache_salt: str = "",
    ) -> RequestStream:
        """Accept a request and return its stream; all refusals are raised here.

        `prompt` is text, token ids, or chat messages. `request_id` names it in logs and for `abort`
        (default: one that nobody has). `priority` (smaller is more urgent) and
        `user` are for the policy. After `timeout` seconds an unfinished request ends with finish
        reason `timeout`. Prefixes are shared within one `cache_salt` only. Raises `RequestError`,
        `RequestIdInUseError`, `EngineOverloadedError` or `EngineDeadError`.
        """
        if timeout is not None and not timeout > 0:
            raise RequestError(f"timeout must be above 0 seconds, got {timeout}", param="timeout")
        self._check_alive()
        assert self._core is not None
        arrival_time = self._clock()  # before tokenizing: waiting for that is waiting, too
        params = self._input_processor.complete_params(sampling_params or SamplingParams())
        token_ids = await self._tokenize(prompt)
        self._check_alive()
        request_id = request_id or f"req-{uuid4().hex}"
        stream = RequestStream(
            request_id, len(token_ids), params.n, abort=lambda: self._drop(samples)
        )
        samples = self._output_processor.claim(stream, params.n)
        try:
            for index, sample_id in enumerate(samples.ids):
                own = params  # of this sample
                if params.n > 1:
                    seed = None if params.seed is None else params.seed + index
                    own = msgspec.structs.replace(params, n=1, seed=seed)
                request = Request(
                    sample_id,
                    token_ids,
                    own,
                    arrival_time=arrival_time,
                    eos_token_ids=self.model_info.eos_token_ids,
                    priority=priority,
                    user=user,
                    cache_salt=cache_salt,
                    deadline=None if timeout is None else arrival_time + timeout,
                )
                self._core.add_request(request)
                self._output_processor.add_request(request, samples, index)
        except BaseException as error:
            self._drop(samples)
            if isinstance(error, EngineOverloadedError):
                error.retry_after = self._estimate_wait()
            raise
        return stream

    async def _tokenize(self, prompt: Prompt) -> list[int]:
        """Refuses what is too long, or too much for the queue, before the work is done."""
        assert self._core is not None
        least = self._input_processor.least_tokens(prompt)
        try:
            self._core.scheduler.check_queue(least, self._num_arriving, self._arriving_tokens)
        except EngineOverloadedError as error:
            error.retry_after = self._estimate_wait()
            raise
        self._num_arriving += 1
        self._arriving_tokens += least
        try:
            return await self._input_processor.tokenize(prompt)
        finally:
            self._num_arriving -= 1
            self._arriving_tokens -= least

    def _estimate_wait(self) -> float:
        """Seconds until today's queue is served, if prompts go on being served as of late."""
        stats = self.get_stats()
        rate = self.metrics.prompt_token_rate.per_second(self._clock())
        if stats is None or rate <= 0:
            return MIN_RETRY_SECONDS
        seconds = (stats.num_waiting_tokens + self._arriving_tokens) / rate
        return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of the request, not of this call
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Yield the deltas of one request. Leaving the loop, or cancelling the task, aborts it."""
        stream = await self.add_request(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            user=user,
            timeout=timeout,
            cache_salt=cache_salt,
        )
        async with stream:
            async for output in stream:
                yield output

    def abort(self, request_id: str) -> bool:
        """End a request from outside: its reader gets what there is, with finish reason `abort`.

        False if there is none of that id: it has ended, or is still being tokenized.
        """
        samples = self._output_processor.samples_of(request_id) if self._core is not None else None
        if samples is None or self._core is None or self._error is not None:
            return False
        ended = self._core.finish_requests(samples.ids, RequestStatus.FINISHED_ABORTED)
        self._output_processor.end_requests(ended, FinishReason.ABORT, self._clock())
        return bool(ended)

    def switch_policy(self, policy: str, options: dict[str, Any] | None = None) -> None:
        """Change the policy between two steps; queue, running requests and KV cache stay.

        Raises `ConfigError` for a policy, option or limit that cannot work, and `PolicyError` if
        the new policy cannot order the requests that are there. The old one goes on then.
        """
        self._check_alive()
        assert self._core is not None
        settings = msgspec.structs.replace(
            self.config.scheduler, policy=policy, options=options or {}
        )
        self._core.switch(settings)
        self.config = msgspec.structs.replace(self.config, scheduler=settings)
        logger.info("policy is now %s %s", policy, options or {})

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; True if the KV cache is now empty."""
        self._check_alive()
        assert self._core is not None
        is_empty = self._core.scheduler.reset_prefix_cache()
        self._tell_kv_events()
        return is_empty

    def get_stats(self) -> SchedulerStats | None:
        """The scheduler's state and totals; None before the start and after the end."""
        return None if self._core is None else self._core.scheduler.make_stats()

    async def wait_ended(self) -> None:
        """Return once `shutdown` has ended the engine task; raises `EngineDeadError` if it dies."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._error is not None:
            raise EngineDeadError(f"the engine has died: {self._error}") from self._error

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for so many seconds, abort the rest.

        Idempotent. Streams that are aborted end with finish reason `abort`. During a start it waits
        until what is being loaded can be given back.
        """
        self._is_closing = True
        if self._start_is_over is not None:
            await self._start_is_over.wait()
        if self._shadow_timer is not None:
            self._shadow_timer.cancel()
        if self._core is not None and self._task is not None:
            await self._drain(self._core, drain_timeout)
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._core is not None:  # nobody else has come as far meanwhile
            self._core.scheduler.shutdown()
            self._core = None
            self._input_processor.close()
        if self._request_log is not None:
            self._request_log.close()
        if self._runner is not None:
            await self._runner.close()

    async def _drain(self, core: EngineCore, seconds: float) -> None:
        deadline = self._clock() + seconds
        # Polled: it happens once in a life, which an event of its own would not be worth.
        while (  # noqa: ASYNC110
            self._error is None and len(self._output_processor) and self._clock() < deadline
        ):
            await asyncio.sleep(0.01)
        if self._error is None:
            aborted = core.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self._output_processor.end_requests(aborted, FinishReason.ABORT, self._clock())

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

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(f"the engine has died: {self._error}") from self._error
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down")
        if self._core is None:
            raise EngineDeadError("the engine has not been started")

    def _get_wait_reasons(self) -> Counter[WaitReason]:
        reasons = {} if self._core is None else self._core.scheduler.get_wait_reasons()
        return Counter(reasons.values())

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        assert self._core is not None
        stopped = self._output_processor.process_outputs(outputs, self._clock())
        if stopped:
            self._core.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        if self._shadow is not None:
            self._advance_shadow()

    def _log_failure(self, culprit: str, error: Exception) -> None:
        if self._core is not None:
            self._core.log_failure(culprit, error)

    def _tell_kv_events(self) -> None:
        if self._kv_events is not None:
            self._kv_events.deliver()

    def _expire(self, request_ids: list[str]) -> None:
        self._output_processor.end_requests(request_ids, FinishReason.TIMEOUT, self._clock())

    def _fail(self, request_ids: list[str], cause: Exception) -> None:
        # An error of ours says what it should. Any other may quote anything: clients get its type,
        # the log and Python callers (as __cause__) get it all.
        error = RequestFailedError(
            str(cause)
            if isinstance(cause, PolicyError)
            else f"the step that served this request failed ({type(cause).__name__})"
        )
        error.__cause__ = cause
        self._output_processor.fail_requests(request_ids, error, self._clock())

    def _drop(self, samples: Samples) -> None:
        """The reader has left."""
        ids = self._output_processor.drop(samples, self._clock())
        if ids and self._core is not None and self._error is None:
            self._core.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Nobody may wait for a dead task: every open stream hears why."""
        if task.cancelled():
            return
        self._error = task.exception()
        logger.critical("the engine has died", exc_info=self._error)
        error = EngineDeadError(f"the engine has died: {self._error}")
        error.__cause__ = self._error
        self._output_processor.fail_requests(None, error, self._clock())


def make_runner(config: EngineConfig, model_info: ModelInfo) -> RunnerInterface:
    """The runner that the config names; only that one is imported."""
    if config.runner.runner == "simulated":
        from aioserve.runner.simulated import SimulatedRunner

        return SimulatedRunner(config, model_info)
    from aioserve.runner.devices import choose_device

    if choose_device(config) == "cuda":
        from aioserve.runner.cuda.runner import OverlappedRunner

        return OverlappedRunner.on_cuda(config, model_info)
    from aioserve.runner.threaded import ThreadedRunner

    return ThreadedRunner(config, model_info)
