"""What callers and the server ask of an engine: one of this process, of another one, or of many.

From a prompt to a stream of its outputs. Knows no scheduler and no steps.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Unpack
from uuid import uuid4

from aioserve.config import EngineConfig
from aioserve.engine.clock import Clock
from aioserve.engine.input_processor import (
    NOTHING_SAMPLED,
    InputProcessor,
    PoolingValidator,
    Prompt,
)
from aioserve.engine.prompt import ReadMedia
from aioserve.engine.stream import Claims, Origin, RequestStream, Samples
from aioserve.errors import RequestAbortedError, RequestError
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import EmbeddingOutput, FinishedOutput, RequestOutput
from aioserve.params import PoolingParams, SamplingParams
from aioserve.request import NO_HINTS, Hints, RequestSpec

if TYPE_CHECKING:
    from aioserve.engine.chat.chat_format import ChatFormat
    from aioserve.engine.language_model import (
        ChatOptions,
        ChatOutput,
        EngineFields,
        FinishedChat,
        Messages,
        T,
    )  # fmt: skip
    from aioserve.engine.operations.command import Answer, EngineCommand

NO_HEADERS: Mapping[str, str] = {}


class FrontParts(Protocol):
    """The parts of an engine, or of a front end of one, that check and tokenize requests."""

    @property
    def input_processor(self) -> InputProcessor: ...
    @property
    def pooling(self) -> PoolingValidator: ...
    @property
    def claims(self) -> Claims: ...
    @property
    def clock(self) -> Clock: ...


class ServedAdapters(Protocol):
    """The LoRA adapters that requests can name."""

    @property
    def paths(self) -> Mapping[str, Path]:
        """Adapters by name, in the order in which they were loaded."""

    def check_name(self, name: str) -> None:
        """Raises `UnknownModelError` if it is neither the model's nor an adapter's."""


class _Claimed(NamedTuple):
    engine: "EngineClient"
    samples: Samples

    def __enter__(self) -> Samples:
        return self.samples

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            return self.engine._drop(self.samples)
        self.samples.is_arriving = False
        if self.samples.is_aborted:
            self.engine._abort(self.samples)


class EngineClient(ABC):
    """A client of an engine, which serves requests from any number of tasks of one event loop.

    Checks requests and tokenizes their prompts in this process; where steps are computed, in this
    one, another one or many, is known to the class that derives from it.
    """

    config: EngineConfig
    model_info: ModelInfo
    max_model_len: int  # known after start
    started_at: int  # in seconds since 1970; the same for all that are in front of one engine
    _chat_format: "ChatFormat | None" = None

    @property
    @abstractmethod
    def adapters(self) -> ServedAdapters:
        """The LoRA adapters that are served. Raises `EngineDeadError` before a start."""

    @property
    def media(self) -> ReadMedia:
        """Media that prompts may hold besides text, and how a text mentions them."""
        return self._alive().input_processor.media

    @property
    def supports_embeddings(self) -> bool:
        """Whether the model can turn prompts into embeddings."""
        return self._alive().pooling.can_pool

    @property
    def runner_parameters(self) -> Set[str]:
        """Sampling parameters that not every runner serves, and this engine's does."""
        return self._alive().input_processor.sampling.served

    def arriving(self) -> AbstractAsyncContextManager[object]:
        """Inside the block one more request counts as waiting: what it needs is being brought. May
        raise `EngineOverloadedError`, as `add_request`. A front end that does not know the queue
        counts none.
        """
        return nullcontext()

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
        hints: Hints = NO_HINTS,
        key_name: str = "",
        client: str = "",
        trace_headers: Mapping[str, str] = NO_HEADERS,
    ) -> RequestStream:
        """Accept a request and return its stream; all refusals are raised here.

        `prompt` is text, token ids, or chat messages. Without `params`, tokens are sampled as the
        model recommends. With `PoolingParams` the stream is one output that holds the prompt's
        `embedding`. Raises `RequestError`, `RequestIdInUseError`,
        `EngineOverloadedError` or `EngineDeadError`; for its adapter `RequestTimeoutError` or
        `RequestFailedError`.
        """
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise RequestError(f"timeout must be above 0 seconds, got {timeout!r}", "timeout")
        parts = self._alive()
        arrival_time = parts.clock()  # before tokenizing: waiting for that is waiting, too
        sampling, pooling = NOTHING_SAMPLED, None
        if isinstance(params, PoolingParams):
            pooling = parts.pooling.complete(params)
        else:
            if not (params is None or isinstance(params, SamplingParams)):
                raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
            params = params or self.model_info.sampling_defaults.fill({})
            sampling = parts.input_processor.sampling.complete(params)
        request_id = request_id or f"req-{uuid4().hex}"
        if self.config.server.log_prompts:
            from aioserve.engine.request_log import log_prompt

            log_prompt(request_id, prompt, sampling)
        model, operation = self.config.model.served_name, ""
        if self.config.server.otlp_traces_endpoint is not None:
            from aioserve.engine.tracing import operation_of

            operation = operation_of(prompt, is_pooled=pooling is not None)
        with self._claimed(request_id, sampling.n, parts.claims) as samples:
            samples.origin = Origin(client, adapter or model, operation, dict(trace_headers))
            adapter = "" if adapter == model else adapter
            stream = RequestStream(request_id, sampling.n, abort=lambda: self._drop(samples))
            room = parts.input_processor.room(pooling or sampling)
            await parts.input_processor.load_for(prompt)
            least = parts.input_processor.least_tokens(prompt, room)
            with self._arriving(least):
                encoded = await parts.input_processor.tokenize(prompt, room)
                stream.num_prompt_tokens = len(encoded.token_ids)
                stream.prompt_token_ids = encoded.token_ids
                spec = RequestSpec(
                    request_id,
                    encoded.token_ids,
                    sampling,
                    arrival_time=arrival_time,
                    eos_token_ids=self.model_info.eos_token_ids,
                    priority=priority,
                    user=user,
                    cache_salt=cache_salt,
                    encoder_inputs=encoded.encoder_inputs,
                    deadline=None if timeout is None else arrival_time + timeout,
                    pooling_params=pooling,
                    key_name=key_name,
                    hints=hints,
                )
                try:
                    await self._submit(spec, samples, stream, adapter, timeout)
                except RequestError as error:
                    encoded.name_part(error)
                    raise
        return stream

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **fields: "Unpack[EngineFields]",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the deltas of one request. Leaving the loop, or cancelling the task, aborts it."""
        stream = await self.add_request(prompt, sampling_params, **fields)
        async with stream:
            async for output in stream:
                yield output

    async def generate_one(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **fields: "Unpack[EngineFields]",
    ) -> FinishedOutput:
        """Return the whole reply to a prompt in one output, with its `times`. Cancelling the task
        aborts the request. Raises what `add_request` and the stream raise, and `RequestError` if
        `n` is not 1. A reply that a time limit or `abort` has ended has that finish reason.
        """
        from aioserve.support.whole_texts import check_one_sample, whole_output

        check_one_sample(sampling_params)
        self._alive()
        params = sampling_params or self.model_info.sampling_defaults.fill({})
        # No delta is looked at, so that none need be made.
        params = params.with_checked(output_kind="final_only")
        async with await self.add_request(prompt, params, **fields) as stream:
            return await whole_output(stream)

    async def generate_all(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_concurrency: int | None = None,
        **fields: "Unpack[EngineFields]",
    ) -> list[FinishedOutput]:
        """Return the whole replies to many prompts, in their order, as `generate_one` gives them.

        At most `max_concurrency` requests are under way at a time (default: as many as a step can
        have). A sequence of parameters has those of each prompt. One that is refused for lack of
        room is asked again. With a `request_id` prompt i has `request_id-i`. Cancelling aborts all.

        An error of one prompt does not end the others: after all have ended, `PromptsFailedError`
        is raised, whose `results` has texts and errors. Raises `RequestError` for a single text.
        """
        from aioserve.support.whole_texts import generate_all

        self._alive()
        return await generate_all(
            lambda prompt, params, own: self.generate_one(prompt, params, **own),
            prompts,
            sampling_params,
            self.config.scheduler.max_num_seqs if max_concurrency is None else max_concurrency,
            fields,
        )

    async def chat(
        self,
        messages: "Messages",
        sampling_params: SamplingParams | None = None,
        **options: "Unpack[ChatOptions[T]]",
    ) -> "AsyncGenerator[ChatOutput[T], None]":
        """Yield what the reply to a conversation says, told apart into text, reasoning and calls of
        `tools`; with `response_type`, the last output has `parsed`. Leaving the loop, or cancelling
        the task, aborts the request. Raises what `add_request` raises.
        """
        from aioserve.engine.chat.replies import prepare_chat

        self._alive()
        params = sampling_params or self.model_info.sampling_defaults.fill({})
        chat_format = await self._read_chat_format()
        chat, fields = await prepare_chat(chat_format, messages, params, options)
        async with await self.add_request(chat.conversation, chat.params, **fields) as stream:
            async for output in stream:
                yield chat.read(output, stream.prompt_token_ids)

    async def chat_one(
        self,
        messages: "Messages",
        sampling_params: SamplingParams | None = None,
        **options: "Unpack[ChatOptions[T]]",
    ) -> "FinishedChat[T]":
        """Return the whole reply to a conversation in one output, as `chat` tells it."""
        from aioserve.engine.language_model import whole_chat

        return await whole_chat(self.chat(messages, sampling_params, **options), sampling_params)

    async def _read_chat_format(self) -> "ChatFormat":
        """Return what reads replies to chats. It is made for the first of them, on a thread: to
        look through a large vocabulary takes tens of milliseconds.
        """
        if self._chat_format is None:
            from aioserve.engine.chat.chat_format import ChatFormat

            tokenizer = self.model_info.tokenizer
            made = await asyncio.to_thread(ChatFormat.of, tokenizer, self.config)
            self._chat_format = self._chat_format or made  # another chat may have been faster
        return self._chat_format

    def _close_chat_format(self) -> None:
        """End what renders the templates of chats. Every engine calls it where it ends."""
        if self._chat_format is not None:
            self._chat_format.close()

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        **fields: "Unpack[EngineFields]",
    ) -> EmbeddingOutput:
        """Embed a prompt: the vector of its pooled hidden states. Cancelling the task aborts it.
        Raises what `add_request` does, and `RequestTimeoutError` or `RequestAbortedError` where a
        stream would have ended without a vector.
        """
        from aioserve.support.whole_texts import read_embedding

        stream = await self.add_request(prompt, pooling_params or PoolingParams(), **fields)
        try:
            async with stream:
                return await read_embedding(stream.request_id, stream)
        except RequestAbortedError:
            self._alive()  # that it shuts down is what the caller should know
            raise

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids that a request of this prompt would have, even if those are too
        many.

        `add_special_tokens` is for text: a chat template says which there are. Raises
        `RequestError`, with the `param` "prompt" for a wrong text or one whose length alone shows
        that it is too long for the model.
        """
        processor = self._alive().input_processor
        room = processor.room(NOTHING_SAMPLED)
        await processor.load_for(prompt)
        processor.least_tokens(prompt, room)
        return await processor.encode(prompt, room, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, special tokens included. Raises `RequestError`, with the
        `param` "tokens", for an id that the model does not have, and if there is no tokenizer.
        """
        return await self._alive().input_processor.decode(token_ids)

    async def abort(self, request_id: str) -> bool:
        """End a request from outside: its reader gets what there is, with finish reason `abort`.

        False if no request has that id: it has ended. One that is still being tokenized ends as
        soon as that is done, without a token; no longer does it wait for its adapter.
        """
        return self.abort_now(request_id)

    @abstractmethod
    def abort_now(self, request_id: str) -> bool:
        """Do what `abort` does, for code that cannot await."""

    @abstractmethod
    async def ask(self, command: "EngineCommand[Answer]") -> "Answer":
        """Run an operator's command in the engine. Raises what the command raises."""

    @abstractmethod
    def _alive(self) -> FrontParts:
        """Return the parts that serve requests. Raises `EngineDeadError` if that is not the
        time.
        """

    def _arriving(self, num_tokens: int) -> AbstractContextManager[None]:
        """Inside the block a request of `num_tokens` tokens or more is tokenized and added. May
        raise `EngineOverloadedError`, where it is known whether there is room in the queue.
        """
        return nullcontext()

    @abstractmethod
    async def _submit(
        self,
        spec: RequestSpec,
        samples: Samples,
        stream: RequestStream,
        adapter: str,
        seconds: float | None,
    ) -> None:
        """Hand a request over; returns when it is accepted; its outputs go to `stream`.
        `seconds` bounds the waiting for the adapter.
        """

    @abstractmethod
    def _drop(self, samples: Samples) -> None:
        """Drop a request whose reader has left, possibly after its end."""

    @abstractmethod
    def _abort(self, samples: Samples) -> bool:
        """Abort requests; returns whether any really ended by this call."""

    def _claimed(self, request_id: str, n: int, claims: Claims) -> "_Claimed":
        """Claim the ids of a request inside the block, where it is accepted or dropped."""
        return _Claimed(self, claims.claim(request_id, n))

    def _abort_if_here(self, request_id: str, claims: Claims) -> bool:
        samples = claims.samples_of(request_id)
        if samples is not None and samples.is_arriving:
            samples.is_aborted = True
            if samples.let_go is not None:
                samples.let_go()
            return True
        return samples is not None and self._abort(samples)
