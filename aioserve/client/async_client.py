"""`AsyncClient`: what a program asks of a server, with the methods of the engine.

Speaks the wire structs of the server. Loads neither the engine nor torch.
"""

import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeGuard, Unpack, cast
from uuid import uuid4

import aiohttp
import msgspec
from msgspec import UNSET, UnsetType

from aioserve.apis.scoring.protocol import Ranked, Ranking, RerankRequest, ScoreList, ScoreRequest
from aioserve.client.connection import Connection, error_decoder, error_from_wire, with_id
from aioserve.client.files_and_batches import ClientBatches, ClientFiles
from aioserve.engine.chat.tools import NamedToolChoice
from aioserve.engine.language_model import (
    NOT_ENDED,
    ChatOptions,
    ChatOutput,
    FinishedChat,
    Messages,
    ModelPrompt,
    RequestFields,
    T,
    ToolCall,
    ToolChoice,
    parse,
    schema_of,
    tool_of,
    whole_chat,
)
from aioserve.engine.operations import OperatorCommand, OperatorMethods
from aioserve.engine.operations.command import Told
from aioserve.errors import UNREADABLE, EngineDeadError, RequestError, RequestFailedError
from aioserve.outputs import (
    EmbeddingOutput,
    FinishedOutput,
    RequestOutput,
    RequestTimes,
    TokenLogprobs,
)
from aioserve.params import PoolingParams, SamplingDefaults, SamplingParams
from aioserve.server.chat.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatMessage,
    FunctionCall,
    ToolCallDelta,
)
from aioserve.server.chat.protocol import ToolCall as WireCall
from aioserve.server.errors import UnknownRequestError
from aioserve.server.protocol import (
    SHARED_SAMPLING_FIELDS,
    Choice,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Envelope,
    JsonSchema,
    ModelCard,
    ModelList,
    PromptLogprobs,
    ResponseFormat,
    StreamOptions,
)
from aioserve.support.whole_texts import (
    check_one_sample,
    check_params,
    generate_all,
    whole_output,
)

_encoder = msgspec.json.Encoder()
_completion_decoder = msgspec.json.Decoder(Completion)
_chat_decoder = msgspec.json.Decoder(ChatCompletion)
_chat_chunk_decoder = msgspec.json.Decoder(ChatCompletionChunk)

_OF_CHATS = ChatOptions.__annotations__.keys() - RequestFields.__annotations__
_CHAT = "/v1/chat/completions"
_STREAM_OPTIONS = StreamOptions(continuous_usage_stats=True)


class AsyncClient(OperatorMethods):
    """Requests to one server. Leaving a stream early aborts the request there.

    All methods raise what the engine raises: `RequestError` (with `param`),
    `RequestIdInUseError`, `EngineOverloadedError` (with `retry_after`), `RequestFailedError`, and
    `EngineDeadError` for a server that goes away: `EngineUnavailableError` (with `retry_after`) for
    one that cannot be reached, loads or drains. A request that is refused for lack of room, or by
    a server that is unavailable, is sent again after `retry_after` seconds, 60 at most, up to
    `retries` times; a request that the server may have begun with is not. If a request asks for
    `final_only`, the outputs of all its samples come together, when the last sample has ended.

        async with AsyncClient("http://127.0.0.1:8000") as client:
            async for output in client.generate("Once", SamplingParams(max_tokens=32)):
                print(output.text, end="")

    The operators' commands are methods of its base, as `pause` and `switch_policy`: they need a
    server with admin routes. `files` and `batches` need one with a `--batch-dir`.

    A server on a Unix socket (`--uds`) has the address `unix:/path/of/its.sock`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,  # None: whatever the server has
        timeout: float | None = None,  # seconds without a byte, waiting in its queue included
        connect_timeout: float = 10.0,
        api_key: str | None = None,  # one of the server's, or of what stands before it
        headers: Mapping[str, str] | None = None,  # of every request
        retries: int = 0,  # how often a request that is refused for now is sent again
    ) -> None:
        self.model = model
        self._connection = Connection(
            base_url,
            timeout=timeout,
            connect_timeout=connect_timeout,
            api_key=api_key,
            headers=headers,
            retries=retries,
        )

    @property
    def base_url(self) -> str:
        """The server's address, without a slash at its end."""
        return self._connection.base_url

    async def __aenter__(self) -> Self:
        self._connection.session()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; streams that are still read end with an error."""
        await self._connection.close()

    def generate(
        self,
        prompt: ModelPrompt,
        sampling_params: SamplingParams | None = None,
        **fields: Unpack[RequestFields],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the deltas of all samples of a prompt, a text, token ids or messages, as
        `AsyncEngine.generate` yields them: what the model writes, reasoning and calls included.

        `async for ... break` aborts when the generator is collected, which CPython does at once
        if nothing else refers to it; `contextlib.aclosing` aborts at a line of your choice.
        """
        check_params(sampling_params)
        params = sampling_params or SamplingParams()
        shared = self._shared(params, fields, is_given=sampling_params is not None)
        if is_conversation(prompt):
            chat = _chat_body(prompt, params, shared)
            chat.separate_reasoning = False  # as the engine's own text
            return self._outputs(_CHAT, chat)
        body = CompletionRequest(
            prompt=_text_or_ids(prompt),
            max_tokens=params.max_tokens,
            logprobs=params.logprobs,
            **shared,
        )
        return self._outputs("/v1/completions", body)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: "Unpack[ChatOptions[T]]",
    ) -> "AsyncGenerator[ChatOutput[T], None]":
        """Return what the reply to a conversation says, told apart into text, reasoning and calls
        of `tools`, as `AsyncEngine.chat` yields it; with `response_type`, the last output has
        `parsed`. Leaving the loop aborts the request at the server.
        """
        check_params(sampling_params)
        is_conversation(messages)
        params = sampling_params or SamplingParams()
        fields = {name: value for name, value in options.items() if name not in _OF_CHATS}
        for name in fields.keys() - RequestFields.__annotations__:
            raise TypeError(f"chat() got an unexpected keyword argument {name!r}")
        is_given = sampling_params is not None
        shared = self._shared(params, cast(RequestFields, fields), is_given=is_given)
        body, kind = _chat_body(messages, params, shared), options.get("response_type")
        if tools := options.get("tools"):
            body.tools = [tool_of(tool) for tool in tools]
            body.tool_choice = _tool_choice(options.get("tool_choice", "auto"))
        elif options.get("tool_choice", "auto") not in ("auto", "none"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        body.chat_template_kwargs = cast(Any, options.get("chat_template_kwargs") or None)
        body.reasoning_effort = cast(Any, options.get("reasoning_effort"))  # the server checks it
        if kind is not None:
            if params.structured_outputs is not None:
                words = "give response_type or structured_outputs, not both"
                raise RequestError(words, param="response_type")
            schema = JsonSchema(name="reply", schema=schema_of(kind))
            body.response_format = ResponseFormat(type="json_schema", json_schema=schema)
        return self._chat(body, kind)

    async def chat_one(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: "Unpack[ChatOptions[T]]",
    ) -> "FinishedChat[T]":
        """Return the whole reply to a conversation in one output, as `chat` tells it. Cancelling
        the task aborts the request. Raises `RequestError` if `n` is not 1.
        """
        return await whole_chat(self.chat(messages, sampling_params, **options), sampling_params)

    async def generate_one(
        self,
        prompt: ModelPrompt,
        sampling_params: SamplingParams | None = None,
        **fields: Unpack[RequestFields],
    ) -> FinishedOutput:
        """Return the whole reply to a prompt, a text, token ids or messages, in one output with its
        `times`. Cancelling the task aborts the request at the server.

        Raises what `generate` raises, and `RequestError` if `n` is not 1. One that a time limit
        has ended is an output as well: its finish reason says so.
        """
        check_one_sample(sampling_params)
        # Deltas are read, though the whole is wanted: they tell when the first token was there.
        outputs = self.generate(prompt, sampling_params, **fields)
        async with aclosing(outputs):
            return await whole_output(outputs)

    async def generate_all(
        self,
        prompts: Iterable[ModelPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_concurrency: int | None = None,
        **fields: Unpack[RequestFields],
    ) -> list[FinishedOutput]:
        """Return the whole replies to many prompts, in their order, as `generate_one` gives them.

        At most `max_concurrency` requests are under way at a time, by default 64. A sequence of
        parameters has those of each prompt. One that the server refuses for lack of room is sent
        again when the server says. With a `request_id` prompt i has `request_id-i`. Cancelling the
        task aborts all of them.

        An error of one prompt does not end the others: after all have ended, `PromptsFailedError`
        is raised, whose `results` has the texts and the errors. Raises `RequestError` at once for
        what cannot be meant, as a single text in the place of a list.
        """
        return await generate_all(
            lambda prompt, params, own: self.generate_one(prompt, params, **own),
            prompts,
            sampling_params,
            64 if max_concurrency is None else max_concurrency,
            fields,
        )

    async def embed(
        self,
        prompt: ModelPrompt,
        pooling_params: PoolingParams | None = None,
        **fields: Unpack[RequestFields],
    ) -> EmbeddingOutput:
        """Embed a prompt, as `AsyncEngine.embed`: return the vector of its pooled hidden states.
        Cancelling the task aborts the request at the server.

        Raises `RequestTimeoutError` or `RequestAbortedError` where there is no vector.
        """
        import numpy as np

        from aioserve.server.embeddings import EmbeddingList, EmbeddingRequest

        if is_conversation(prompt):
            prompt = await self.tokenize(prompt)
        given = msgspec.structs.asdict(pooling_params or PoolingParams())
        request = self._request(fields)
        request["request_id"] = request["request_id"] or f"embd-{uuid4().hex}"
        body = EmbeddingRequest(
            input=_text_or_ids(prompt),
            encoding_format="base64",
            **given,
            **request,
        )
        told = await self._connection.told(EmbeddingList, "/v1/embeddings", body)
        [vector] = told.data
        details = told.usage.prompt_tokens_details
        return EmbeddingOutput(
            request_id=request["request_id"],
            embedding=np.frombuffer(base64.b64decode(str(vector.embedding)), dtype="<f4"),
            num_prompt_tokens=told.usage.prompt_tokens,
            num_cached_tokens=details.cached_tokens if details else 0,
        )

    async def tokenize(self, prompt: ModelPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids that a request of this prompt would have, as `AsyncEngine.tokenize`.

        `add_special_tokens` is for text: a chat template says which there are.
        """
        from aioserve.server.tokenization import Tokenized, TokenizeRequest

        if is_conversation(prompt):
            body = TokenizeRequest(model=self.model, messages=_wire_messages(prompt))
        elif isinstance(prompt, str):
            body = TokenizeRequest(
                model=self.model, prompt=prompt, add_special_tokens=add_special_tokens
            )
        else:
            return list(cast(Sequence[int], prompt))
        return (await self._connection.told(Tokenized, "/tokenize", body)).tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, special tokens included. Raises `RequestError`."""
        from aioserve.server.tokenization import Detokenized, DetokenizeRequest

        body = DetokenizeRequest(model=self.model, tokens=list(token_ids))
        return (await self._connection.told(Detokenized, "/detokenize", body)).prompt

    async def abort(self, request_id: str) -> bool:
        """End a request of the server: its reader gets what there is, with finish reason `abort`.

        False if no running request has that id, or it belongs to another API key.
        """
        from aioserve.server.operators import Aborted, AbortRequest

        try:
            body = AbortRequest(request_id=request_id)
            return (await self._connection.told(Aborted, "/v1/abort", body)).aborted
        except UnknownRequestError:
            return False

    async def score(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """Return how well each of `documents` fits the query, between 0 and 1, as a reranker model
        says; in their order. `instruction` is what makes a document fit, in words.
        """
        asked = ScoreRequest(
            model=self.model, text_1=query, text_2=list(documents), instruction=instruction
        )
        told = await self._connection.told(ScoreList, "/v1/score", asked)
        return [each.score for each in told.data or ()]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
    ) -> list[Ranked]:
        """Return the `top_n` of `documents` that fit the query best, or all, the best first:
        `index` is the place among `documents`, `relevance_score` lies between 0 and 1.
        """
        asked = RerankRequest(
            model=self.model,
            query=query,
            documents=list(documents),
            top_n=top_n,
            instruction=instruction,
            return_documents=False,
        )
        return (await self._connection.told(Ranking, "/v1/rerank", asked)).results

    @cached_property
    def files(self) -> "ClientFiles":
        """Files for batches: upload, download, list and delete them."""
        return ClientFiles(self._connection)

    @cached_property
    def batches(self) -> "ClientBatches":
        """Batches: begin, follow, cancel and list them."""
        return ClientBatches(self._connection)

    async def models(self) -> list[ModelCard]:
        """Return the models that the server serves: id, max_model_len, and what they can do."""
        return (await self._connection.asked(ModelList, "GET", "/v1/models")).data

    async def health(self) -> bool:
        """Return whether a new request would be served now: False while the server loads, drains,
        is in trouble or is away.
        """
        try:
            async with self._connection.request("GET", "/ready", retries=0):
                return True
        except EngineDeadError:
            return False

    async def ask(self, command: OperatorCommand[Any, Told]) -> Told:
        """Give an operator's command, and return what the server answers: what the methods of that
        name do. Raises `RequestError`, also for a server without admin routes.
        """
        http, fields = command.http, command.body()
        body = _encoder.encode(fields) if fields else None
        async with self._connection.request(http.method, http.path, body) as response:
            data = await response.read()
        if command.told_type is str:
            return cast(Told, data.decode(errors="replace"))
        told: Told = self._connection.decoded(msgspec.json.Decoder(command.told_type), data)
        return told

    def _request(self, fields: RequestFields) -> dict[str, Any]:
        """Return the fields of a body that say which request it is, without those left open."""
        return {
            "model": fields.get("adapter") or self.model,
            "request_id": fields.get("request_id"),
            "priority": fields.get("priority") or None,
            "user": fields.get("user") or None,
            "timeout": fields.get("timeout"),
            "cache_salt": fields.get("cache_salt") or None,
            "hints": fields.get("hints") or None,
        }

    def _shared(
        self, params: SamplingParams, fields: RequestFields, *, is_given: bool
    ) -> dict[str, Any]:
        """Return the fields that the bodies of completions and of chats share. Defaults are not
        sent, but for those of parameters that are given and that the model would replace by its
        own.
        """
        default = SamplingParams()
        given = {
            name: value
            for name in SHARED_SAMPLING_FIELDS
            if (value := getattr(params, name)) != getattr(default, name)
            or (is_given and name in SamplingDefaults.__struct_fields__)
        }
        is_stream = params.output_kind == "delta"
        return given | {
            **self._request(fields),
            "stream": is_stream or None,
            "stream_options": _STREAM_OPTIONS if is_stream else None,
            "return_token_ids": True,
        }

    async def _outputs(
        self, path: str, body: CompletionRequest | ChatCompletionRequest
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a reply whose text is the engine's own."""
        async with aclosing(self._choices(path, body)) as choices:
            async for output, _ in choices:
                yield output

    async def _chat(
        self, body: ChatCompletionRequest, response_type: "type[T] | None"
    ) -> "AsyncGenerator[ChatOutput[T], None]":
        readers: dict[int, ChatReader] = {}
        async with aclosing(self._choices(_CHAT, body)) as choices:
            async for output, choice in choices:
                if output.index not in readers:
                    readers[output.index] = ChatReader(response_type)
                yield readers[output.index].read(output, choice)

    async def _choices(
        self, path: str, body: CompletionRequest | ChatCompletionRequest
    ) -> AsyncGenerator[tuple[RequestOutput, Choice], None]:
        """Yield the outputs of a reply, each with the choice on the wire that it is of."""
        sent, first_tokens = time.monotonic(), dict[int, float]()
        is_chat = isinstance(body, ChatCompletionRequest)
        reply: Completion | ChatCompletion | ChatCompletionChunk
        async with self._connection.request("POST", path, _encoder.encode(body)) as response:
            if not body.stream:
                decoder: Any = _chat_decoder if is_chat else _completion_decoder
                reply = self._connection.decoded(decoder, await response.read())
                for choice in reply.choices:
                    output = _output(reply, choice, body.prompt_logprobs)
                    output.num_output_tokens = len(output.token_ids)
                    output.times = RequestTimes(sent, time.monotonic())
                    yield output, choice
                return
            decoder = _chat_chunk_decoder if is_chat else _completion_decoder
            async for data in _events(response.content):
                if data == b"[DONE]":
                    return
                if data.startswith(b'{"error"'):
                    info = self._connection.decoded(error_decoder, data, "an event").error
                    raise error_from_wire(500, info, response)
                reply = self._connection.decoded(decoder, data, "an event")
                for choice in reply.choices:
                    if isinstance(choice, ChatChunkChoice) and choice.delta.role is not UNSET:
                        continue  # it only says the role
                    output = _output(reply, choice, body.prompt_logprobs)
                    if reply.usage:  # of this sample so far
                        output.num_output_tokens = reply.usage.completion_tokens
                    if output.token_ids and output.index not in first_tokens:
                        first_tokens[output.index] = time.monotonic()
                    if output.finished:
                        first = first_tokens.get(output.index)
                        output.times = RequestTimes(sent, time.monotonic(), first)
                    yield output, choice
        broken = RequestFailedError(f"{self.base_url} ended the stream before the last output")
        raise with_id(broken, response)


class ChatReader:
    """A reader of one choice of a chat on the wire: its text, reasoning and whole calls."""

    def __init__(self, response_type: type[Any] | None) -> None:
        self._type = response_type
        self._texts: list[str] = []
        self._calls: list[WireCall] = []  # of a stream, the last of them perhaps in part
        self._num_told = 0

    def read(self, output: RequestOutput, choice: Choice) -> ChatOutput[Any]:
        """Return what the next output of the choice says."""
        told: ChatOutput[Any] = ChatOutput(**msgspec.structs.asdict(output))
        match choice:
            case ChatChoice(message=message):
                told.reasoning = message.reasoning_content or ""
                self._calls = list(message.tool_calls or ())
            case ChatChunkChoice(delta=delta):
                told.reasoning = delta.reasoning_content or ""
                for piece in delta.tool_calls or ():
                    self._add(piece)
        num_whole = len(self._calls) - (not output.finished)
        for call in self._calls[self._num_told : num_whole]:
            name, text = call.function.name, call.function.arguments
            try:
                arguments = msgspec.json.decode(text, type=dict[str, Any])
                told.tool_calls.append(ToolCall(call.id, name, arguments))
            except UNREADABLE:  # the reply was cut in them: it is text, as in the engine's
                quoted = msgspec.json.encode(name).decode()
                told.text += f'{{"name": {quoted}, "arguments": {text}'
        self._num_told = max(self._num_told, num_whole)
        if self._type is not None:
            self._texts.append(told.text)
            if told.finished:
                parse(told, "".join(self._texts), self._type)
            else:
                told.unparsed = NOT_ENDED
        return told

    def _add(self, call: ToolCallDelta) -> None:
        if call.index == len(self._calls):
            function = FunctionCall(name=call.function.name or "", arguments="")
            self._calls.append(WireCall(id=call.id or "", function=function))
        elif not 0 <= call.index < len(self._calls):
            raise RequestFailedError(
                f"the server sent a piece of tool call {call.index} before its beginning"
            )
        self._calls[call.index].function.arguments += call.function.arguments


def _tool_choice(choice: ToolChoice) -> Any:
    if isinstance(choice, Mapping):
        try:
            return msgspec.convert(choice, NamedToolChoice)
        except msgspec.ValidationError as error:
            raise RequestError(f"tool_choice: {error}", param="tool_choice") from error
    return choice


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each event. Splits by itself: aiohttp's line reader has a length limit."""
    rest = b""
    async for received in content.iter_any():
        *events, rest = (rest + received).split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: ")


def is_conversation(prompt: object) -> TypeGuard[Messages]:
    """Return whether a prompt is messages. Raises `RequestError` for what is no prompt."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(
            f"the prompt must be a text, token ids or messages, got {type(prompt).__name__}",
            param="prompt",
        )
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _text_or_ids(prompt: ModelPrompt) -> str | list[str | int | list[int]]:
    return prompt if isinstance(prompt, str) else list(cast(Sequence[int], prompt))


def _wire_messages(messages: Messages) -> list[ChatMessage]:
    try:
        return msgspec.convert(messages, list[ChatMessage])
    except msgspec.ValidationError as error:
        raise RequestError(f"messages: {error}", param="messages") from error


def _chat_body(
    messages: Messages, params: SamplingParams, shared: Mapping[str, Any]
) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        messages=_wire_messages(messages),
        max_completion_tokens=params.max_tokens,
        logprobs=None if params.logprobs is None else True,
        top_logprobs=params.logprobs,
        **shared,
    )


def _output(reply: Envelope, choice: Choice, num_prompt_logprobs: int | None) -> RequestOutput:
    """Return the engine's output behind a choice, without the number of its tokens."""
    output = RequestOutput(
        request_id=reply.id,
        index=choice.index,
        text=_text(choice),
        token_ids=choice.token_ids or [],
        logprobs=choice.raw_logprobs or None,
        prompt_logprobs=_prompt_logprobs(reply, choice, num_prompt_logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=None if choice.stop_reason is UNSET else choice.stop_reason,
    )
    if reply.usage:
        output.num_prompt_tokens = reply.usage.prompt_tokens
        if details := reply.usage.prompt_tokens_details:
            output.num_cached_tokens = details.cached_tokens
    return output


def _prompt_logprobs(
    reply: Envelope, choice: Choice, num_logprobs: int | None
) -> list[TokenLogprobs | None] | None:
    """Prompt logprobs, which the first sample carries."""
    holder = choice if isinstance(choice, CompletionChoice) else reply
    told: PromptLogprobs | UnsetType = getattr(holder, "prompt_logprobs", UNSET)
    if told is UNSET or num_logprobs is None or choice.index:
        return None
    found: list[TokenLogprobs | None] = []
    for position in told:
        if position is None:
            found.append(None)
            continue
        own, *others = items = list(position.items())
        # The prompt's own token comes first; it is an alternative as well, if there is no other.
        top = sorted(others if len(others) == num_logprobs else items, key=lambda i: i[1].rank)
        found.append(
            TokenLogprobs(
                own[1].logprob,
                own[1].rank,
                [token_id for token_id, _ in top][:num_logprobs],
                [value.logprob for _, value in top][:num_logprobs],
            )
        )
    return found


def _text(choice: Choice) -> str:
    match choice:
        case CompletionChoice():
            return choice.text
        case ChatChunkChoice():
            return choice.delta.content or ""
        case ChatChoice():
            return choice.message.content or ""
    return ""
