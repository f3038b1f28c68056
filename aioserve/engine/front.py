"""The half of an engine that callers meet: from a prompt to a stream of its outputs.

The same in front of an engine of this process and of another one. Knows no scheduler and no steps.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar
from uuid import uuid4

from aioserve.config import EngineConfig
from aioserve.engine.clock import Clock
from aioserve.engine.input_processor import InputProcessor, Prompt
from aioserve.engine.output_processor import OutputProcessor
from aioserve.engine.pooling import NOTHING_SAMPLED, PoolingDoor, read_embedding
from aioserve.engine.questions import Question
from aioserve.engine.samples import Samples
from aioserve.engine.stream import RequestStream
from aioserve.errors import RequestAbortedError, RequestError
from aioserve.model_info import ModelInfo
from aioserve.outputs import EmbeddingOutput, RequestOutput
from aioserve.pooling_params import PoolingParams
from aioserve.request import Request, RequestSpec
from aioserve.sampling_params import SamplingParams


class FrontParts(Protocol):
    """What it is made of while it serves."""

    @property
    def input_processor(self) -> InputProcessor: ...
    @property
    def pooling(self) -> PoolingDoor: ...
    @property
    def output_processor(self) -> OutputProcessor: ...
    @property
    def clock(self) -> Clock: ...


class ServedAdapters(Protocol):
    """Which adapters can be asked for."""

    @property
    def paths(self) -> Mapping[str, Path]:
        """By name, in the order in which they were loaded."""

    def check_name(self, name: str) -> None:
        """Raises `UnknownModelError` if it is neither the model's nor an adapter's."""


Parts = TypeVar("Parts", bound=FrontParts)
Answer = TypeVar("Answer")
Register = Callable[[Request, int], None]


class EngineFront(ABC, Generic[Parts]):
    """Serves requests from any number of tasks of one event loop."""

    config: EngineConfig
    model_info: ModelInfo
    max_model_len: int  # known after start
    started_at: int  # in seconds since 1970; the same for all that are in front of one engine

    @property
    @abstractmethod
    def adapters(self) -> ServedAdapters:
        """Those that are served. Raises `EngineDeadError` before a start."""

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
        with self._claimed(request_id, sampling.n, parts) as samples:
            stream = RequestStream(request_id, sampling.n, abort=lambda: self._drop(samples, parts))
            room = parts.input_processor.room(pooling or sampling)
            least = parts.input_processor.least_tokens(prompt, room)
            with self._arriving(least, parts):
                token_ids = await parts.input_processor.tokenize(prompt, room)
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
                )

                def register(request: Request, index: int) -> None:
                    parts.output_processor.add_request(request, samples, index, stream)

                await self._submit(spec, samples, adapter, timeout, register, parts)
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

    @abstractmethod
    def abort(self, request_id: str) -> bool:
        """End a request from outside: its reader gets what there is, with finish reason `abort`.

        False if there is none of that id: it has ended. One that is still being tokenized ends as
        soon as that is done, without a token; no longer does it wait for its adapter.
        """

    @abstractmethod
    async def ask(self, question: Question[Answer]) -> Answer:
        """Raises what the method raises that the question names."""

    @abstractmethod
    def _alive(self) -> Parts:
        """What serves requests. Raises `EngineDeadError` if that is not the time."""

    @abstractmethod
    def _arriving(self, num_tokens: int, parts: Parts) -> AbstractContextManager[None]:
        """Inside the block a request is tokenized and handed over. May raise
        `EngineOverloadedError`.
        """

    @abstractmethod
    async def _submit(
        self,
        spec: RequestSpec,
        samples: Samples,
        adapter: str,
        seconds: float | None,
        register: Register,
        parts: Parts,
    ) -> None:
        """Hand a request over; `register` is called for each sample that was accepted, before there
        are outputs of it. `seconds` bounds the waiting for the adapter.
        """

    @abstractmethod
    def _drop(self, samples: Samples, parts: Parts) -> None:
        """The reader has left: maybe when all is over."""

    @abstractmethod
    def _abort(self, samples: Samples, parts: Parts) -> bool:
        """Whether any of them has really ended by this."""

    @contextmanager
    def _claimed(self, request_id: str, n: int, parts: Parts) -> Iterator[Samples]:
        """The ids of a request that is accepted in the block, or dropped."""
        samples = parts.output_processor.claim(request_id, n)
        try:
            yield samples
        except BaseException:
            self._drop(samples, parts)
            raise
        samples.is_arriving = False
        if samples.is_aborted:
            self._abort(samples, parts)

    def _abort_if_here(self, request_id: str, parts: Parts) -> bool:
        samples = parts.output_processor.samples_of(request_id)
        if samples is not None and samples.is_arriving:
            samples.is_aborted = True
            if samples.let_go is not None:
                samples.let_go()
            return True
        return samples is not None and self._abort(samples, parts)
