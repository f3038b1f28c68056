"""The public Python API: an engine that lives in the caller's event loop.

Guards the door and owns the engine task; what it is made of, `builder` knows. Installs no signal
handlers, opens no ports, starts no processes.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import msgspec

from aioserve.config import EngineConfig
from aioserve.engine.adapters import Adapters
from aioserve.engine.builder import EngineBuilder, EngineParts
from aioserve.engine.input_processor import Prompt
from aioserve.engine.metrics import EngineMetrics
from aioserve.engine.pooling import NOTHING_SAMPLED, read_embedding
from aioserve.engine.samples import Samples
from aioserve.engine.stream import RequestStream
from aioserve.errors import (
    EngineDeadError,
    EngineOverloadedError,
    EngineStartError,
    RequestAbortedError,
    RequestError,
)
from aioserve.kv_cache import KVEvent
from aioserve.model_info import ModelInfo
from aioserve.outputs import EmbeddingOutput, FinishReason, RequestOutput, SchedulerStats
from aioserve.pooling_params import PoolingParams
from aioserve.request import Request, RequestSpec, RequestStatus, WaitReason
from aioserve.runner.interface import RunnerInterface
from aioserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# A policy whose last step failed may work again for the next request, but only a request can show
# it. So long it counts as failing, in seconds: enough for whoever asks now and then. A guess.
POLICY_FAILURE_SECONDS = 10.0


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
            lambda: 0 if self._parts is None else self._parts.core.num_policy_failures,
            lambda: None if self._runner is None else self._runner.num_compute_threads,
        )
        self._runner = runner
        self._on_kv_event = on_kv_event
        self._adapters: Adapters | None = None
        self._parts: EngineParts | None = None  # between start and shutdown
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._start_is_over: asyncio.Event | None = None  # None: there was none
        self._is_closing = False

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
        parts = self._parts
        if parts is None or parts.core.policy_failure is None:
            return None
        error, when = parts.core.policy_failure
        return None if parts.clock() - when > POLICY_FAILURE_SECONDS else error

    @property
    def adapters(self) -> Adapters:
        """Those that are served, to be asked, loaded and unloaded. There are none before a start:
        raises `EngineDeadError`.
        """
        if self._adapters is None:
            raise EngineDeadError("the engine has not been started")
        return self._adapters

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
        builder = EngineBuilder(self.config, self.model_info, self._runner, self.metrics)
        self.config, self._runner = builder.config, builder.runner
        self._adapters = builder.adapters
        try:
            await self._runner.load()
            if self._is_closing:
                raise EngineStartError("shutdown() was called meanwhile")
            await self._adapters.load_configured()
            parts = builder.build(self._on_kv_event)
        except BaseException:
            await builder.close()
            raise
        self._parts, self.max_model_len = parts, parts.max_model_len
        self._task = asyncio.create_task(parts.core.run(), name="aioserve-engine")
        self._task.add_done_callback(lambda task: self._on_task_done(task, parts))

    async def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of the request, not of this call
        cache_salt: str = "",
        adapter: str = "",
    ) -> RequestStream:
        """Accept a request and return its stream; all refusals are raised here.

        `prompt` is text, token ids, or chat messages. With `PoolingParams` the stream is one output
        that holds the prompt's `embedding`. `request_id` names it in logs and for `abort` (default:
        one that nobody has). `priority` (smaller is more urgent) and `user` are for the policy.
        After `timeout` seconds an unfinished request ends with finish reason `timeout`. Prefixes
        are shared within one `cache_salt` only. `adapter` names one of `adapters`, or the model
        itself. Raises `RequestError`, `RequestIdInUseError`, `EngineOverloadedError` or
        `EngineDeadError`; for its adapter `RequestTimeoutError` or `RequestFailedError`.
        """
        if timeout is not None and not timeout > 0:
            raise RequestError(f"timeout must be above 0 seconds, got {timeout}", param="timeout")
        parts = self._alive()
        arrival_time = parts.clock()  # before tokenizing: waiting for that is waiting, too
        sampling, pooling = NOTHING_SAMPLED, None
        if isinstance(params, PoolingParams):
            pooling = parts.pooling.complete(params)
        else:
            sampling = parts.input_processor.complete_params(params or SamplingParams())
        request_id = request_id or f"req-{uuid4().hex}"
        stream = RequestStream(request_id, sampling.n, abort=lambda: self._drop(samples, parts))
        samples = parts.output_processor.claim(stream, sampling.n)
        try:
            token_ids = await parts.arrivals.prepare(
                prompt, pooling or sampling, samples, adapter, timeout
            )
            self._alive()
            stream.num_prompt_tokens = len(token_ids)
            stream.prompt_token_ids = token_ids
            spec = RequestSpec(
                request_id,
                token_ids,
                sampling,
                arrival_time=arrival_time,
                eos_token_ids=self.model_info.eos_token_ids,
                priority=priority,
                user=user,
                cache_salt=cache_salt,
                deadline=None if timeout is None else arrival_time + timeout,
                pooling_params=pooling,
                adapter_id=samples.adapter_id,
            )
            for index, own in enumerate(samples.specs(spec)):
                request = Request(own)
                parts.core.add_request(request)
                parts.output_processor.add_request(request, samples, index)
        except BaseException as error:
            self._drop(samples, parts)
            if isinstance(error, EngineOverloadedError):
                error.retry_after = parts.arrivals.estimate_wait()
            raise
        samples.is_arriving = False
        if samples.is_aborted:
            self._abort(samples.ids, parts)
        return stream

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
        adapter: str = "",
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
            adapter=adapter,
        )
        async with stream:
            async for output in stream:
                yield output

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of the request, not of this call
        cache_salt: str = "",
        adapter: str = "",
    ) -> EmbeddingOutput:
        """The vector of a prompt: its hidden states, pooled. Cancelling the task aborts it.

        The arguments are those of `add_request`. Raises what that does, and `RequestTimeoutError`
        or `RequestAbortedError` where a stream would have ended without a vector.
        """
        stream = await self.add_request(
            prompt,
            pooling_params or PoolingParams(),
            request_id=request_id,
            priority=priority,
            user=user,
            timeout=timeout,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        try:
            return await read_embedding(stream)
        except RequestAbortedError:
            self._alive()  # that it shuts down is what the caller should know
            raise

    def abort(self, request_id: str) -> bool:
        """End a request from outside: its reader gets what there is, with finish reason `abort`.

        False if there is none of that id: it has ended. One that is still being tokenized ends as
        soon as that is done, without a token; no longer does it wait for its adapter.
        """
        parts = self._parts
        if parts is None or self._error is not None:
            return False
        samples = parts.output_processor.samples_of(request_id)
        if samples is not None and samples.is_arriving:
            samples.is_aborted = True
            if samples.let_go is not None:
                samples.let_go()
            return True
        return samples is not None and self._abort(samples.ids, parts)

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids that a request of this prompt would have, even if those are too many.

        `add_special_tokens` is for text: a chat template says which there are. Raises
        `RequestError`, also for text whose length alone shows that it is too long for the model.
        """
        processor = self._alive().input_processor
        room = processor.room(NOTHING_SAMPLED)
        processor.least_tokens(prompt, room)
        return await processor.encode(prompt, room, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, with the special ones. Raises `RequestError`."""
        return await self._alive().input_processor.decode(token_ids)

    def switch_policy(self, policy: str, options: dict[str, Any] | None = None) -> None:
        """Change the policy between two steps; queue, running requests and KV cache stay.

        Raises `ConfigError` for a policy, option or limit that cannot work, and `PolicyError` if
        the new policy cannot order the requests that are there. The old one goes on then.
        """
        parts = self._alive()
        settings = msgspec.structs.replace(
            self.config.scheduler, policy=policy, options=options or {}
        )
        parts.core.switch(settings)
        self.config = msgspec.structs.replace(self.config, scheduler=settings)
        logger.info("policy is now %s %s", policy, options or {})

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; True if the KV cache is now empty."""
        parts = self._alive()
        is_empty = parts.core.scheduler.reset_prefix_cache()
        if parts.kv_events is not None:
            parts.kv_events.deliver()
        return is_empty

    def get_stats(self) -> SchedulerStats | None:
        """The scheduler's state and totals; None before the start and after the end."""
        return None if self._parts is None else self._parts.core.scheduler.make_stats()

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
        if self._adapters is not None:
            await self._adapters.close()
        if self._parts is not None and self._task is not None:
            await self._drain(self._parts, drain_timeout)
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._parts is not None:  # nobody else has come as far meanwhile
            parts, self._parts = self._parts, None
            parts.close()
        if self._runner is not None:
            await self._runner.close()

    async def _drain(self, parts: EngineParts, seconds: float) -> None:
        if parts.shadow_turns is not None:
            parts.shadow_turns.close()
        deadline = parts.clock() + seconds
        # Polled: it happens once in a life, which an event of its own would not be worth.
        while (  # noqa: ASYNC110
            self._error is None and len(parts.output_processor) and parts.clock() < deadline
        ):
            await asyncio.sleep(0.01)
        if self._error is None:
            self._abort(None, parts)

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
        """What serves requests. Raises `EngineDeadError` if that is not the time."""
        if self._error is not None:
            raise EngineDeadError(f"the engine has died: {self._error}") from self._error
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down")
        if self._parts is None:
            raise EngineDeadError("the engine has not been started")
        return self._parts

    def _get_wait_reasons(self) -> Counter[WaitReason]:
        parts = self._parts
        return Counter(() if parts is None else parts.core.scheduler.get_wait_reasons().values())

    def _abort(self, request_ids: list[str] | None, parts: EngineParts) -> bool:
        """Whether anybody, of all if None, has really ended by this."""
        ended = parts.core.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        parts.output_processor.end_requests(ended, FinishReason.ABORT, parts.clock())
        return bool(ended)

    def _drop(self, samples: Samples, parts: EngineParts) -> None:
        """The reader has left: maybe when all is over."""
        ids = parts.output_processor.drop(samples, parts.clock())
        if ids and self._parts is not None and self._error is None:
            parts.core.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def _on_task_done(self, task: asyncio.Task[None], parts: EngineParts) -> None:
        """Nobody may wait for a dead task: every open stream hears why."""
        if task.cancelled():
            return
        self._error = task.exception()
        logger.critical("the engine has died", exc_info=self._error)
        error = EngineDeadError(f"the engine has died: {self._error}")
        error.__cause__ = self._error
        parts.output_processor.fail_requests(None, error, parts.clock())
