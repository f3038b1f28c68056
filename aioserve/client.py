"""A remote aioserve as an async Python API: its streams work like those of the engine.

Speaks the wire structs of the server, and OpenAI's for files and batches. Loads neither the engine
nor torch.
"""

import asyncio
import io
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cached_property
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, TypedDict, TypeVar, Unpack, cast
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from msgspec import UNSET, UnsetType

from aioserve.apis.batches.protocol import (
    Batch,
    BatchesPage,
    BatchList,
    BatchRequest,
    Endpoint,
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileObject,
    FilesPage,
)
from aioserve.apis.scoring.protocol import Ranked, Ranking, RerankRequest, ScoreList, ScoreRequest
from aioserve.engine.operations import OperatorCommand, OperatorMethods
from aioserve.engine.operations.command import Told
from aioserve.errors import (
    UNREADABLE,
    AioserveError,
    EngineDeadError,
    RequestError,
    RequestFailedError,
    one_line,
)
from aioserve.outputs import RequestOutput, RequestTimes, TokenLogprobs
from aioserve.params import SamplingDefaults, SamplingParams
from aioserve.request import Hints
from aioserve.server.chat.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatMessage,
)
from aioserve.server.errors import from_wire
from aioserve.server.protocol import (
    SHARED_SAMPLING_FIELDS,
    Choice,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Envelope,
    ErrorInfo,
    ErrorResponse,
    ModelCard,
    ModelList,
    PromptLogprobs,
    StreamOptions,
)
from aioserve.support.whole_texts import check_one_sample, generate_all, whole_output

_completion_decoder = msgspec.json.Decoder(Completion)
_chat_decoder = msgspec.json.Decoder(ChatCompletion)
_chat_chunk_decoder = msgspec.json.Decoder(ChatCompletionChunk)

_STREAM_OPTIONS = StreamOptions(continuous_usage_stats=True)


#: A text, token ids, or the messages of a conversation.
ClientPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class ClientFields(TypedDict, total=False):
    """Options of a request besides its prompt and its sampling parameters."""

    request_id: str | None  # names it in the server's log (default: the server finds a name)
    priority: int  # for the server's policy: smaller is more urgent
    user: str  # for the server's policy
    timeout: float | None  # seconds until an unfinished one ends with finish reason `timeout`
    cache_salt: str  # prefixes are shared within one only
    hints: Hints  # for the server's policy: named values, such as `predicted_output_tokens`


class AsyncClient(OperatorMethods):
    """Requests to one server. Leaving a stream early aborts the request there.

    All methods raise what the engine raises: `RequestError` (with `param`),
    `RequestIdInUseError`, `EngineOverloadedError` (with `retry_after`), `RequestFailedError`, and
    `EngineDeadError`, also for a server that cannot be reached or goes away. Of all samples of a
    request that asks for `final_only`, the outputs come together, when the last one has ended.

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
    ) -> None:
        self.model = model
        self._connection = Connection(
            base_url,
            timeout=timeout,
            connect_timeout=connect_timeout,
            api_key=api_key,
            headers=headers,
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
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,
        cache_salt: str = "",
        hints: Hints | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Deltas of all samples of `prompt`, a text or token ids, as `AsyncEngine.generate`.

        `async for ... break` aborts when the generator is collected, which CPython does at once
        if nothing else refers to it; `contextlib.aclosing` aborts at a line of your choice.
        """
        params = sampling_params or SamplingParams()
        body = CompletionRequest(
            prompt=prompt if isinstance(prompt, str) else list(prompt),
            max_tokens=params.max_tokens,
            logprobs=params.logprobs,
            **self._shared(params, is_given=sampling_params is not None),
            request_id=request_id,
            priority=priority or None,
            user=user or None,
            timeout=timeout,
            cache_salt=cache_salt or None,
            hints=hints or None,
        )
        if body.stream:
            return self._deltas("/v1/completions", body, _completion_decoder)
        return self._whole("/v1/completions", body, _completion_decoder)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,
        cache_salt: str = "",
        hints: Hints | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like `generate`, for a conversation of `{"role": ..., "content": ...}` mappings."""
        params = sampling_params or SamplingParams()
        try:
            wire_messages = msgspec.convert(messages, list[ChatMessage])
        except msgspec.ValidationError as error:
            raise RequestError(f"messages: {error}", param="messages") from error
        body = ChatCompletionRequest(
            messages=wire_messages,
            max_completion_tokens=params.max_tokens,
            logprobs=None if params.logprobs is None else True,
            top_logprobs=params.logprobs,
            separate_reasoning=False,  # as the engine's own text
            **self._shared(params, is_given=sampling_params is not None),
            request_id=request_id,
            priority=priority or None,
            user=user or None,
            timeout=timeout,
            cache_salt=cache_salt or None,
            hints=hints or None,
        )
        if body.stream:
            return self._deltas("/v1/chat/completions", body, _chat_chunk_decoder)
        return self._whole("/v1/chat/completions", body, _chat_decoder)

    def outputs_of(
        self,
        prompt: ClientPrompt,
        sampling_params: SamplingParams | None = None,
        **fields: Unpack[ClientFields],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the deltas of `chat` for messages, and of `generate` for a text or token ids."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            messages = cast(Sequence[Mapping[str, Any]], prompt)
            return self.chat(messages, sampling_params, **fields)
        return self.generate(cast(str | Sequence[int], prompt), sampling_params, **fields)

    async def generate_one(
        self,
        prompt: ClientPrompt,
        sampling_params: SamplingParams | None = None,
        **fields: Unpack[ClientFields],
    ) -> RequestOutput:
        """Return the whole reply to a prompt, a text, token ids or messages, in one output with its
        `times`. Cancelling the task aborts the request at the server.

        Raises what `generate` raises, and `RequestError` if `n` is not 1. One that a time limit
        has ended is an output as well: its finish reason says so.
        """
        check_one_sample(sampling_params)
        # Deltas are read, though the whole is wanted: they tell when the first token was there.
        outputs = self.outputs_of(prompt, sampling_params, **fields)
        async with aclosing(outputs):
            return await whole_output(outputs)

    async def generate_all(
        self,
        prompts: Iterable[ClientPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_concurrency: int = 64,
        **fields: Unpack[ClientFields],
    ) -> list[RequestOutput]:
        """Return the whole replies to many prompts, in their order, as `generate_one` gives them.

        At most `max_concurrency` requests are under way at a time. A sequence of parameters has
        those of each prompt. One that the server refuses for lack of room is sent again when the
        server says. With a `request_id` prompt i has `request_id-i`. Cancelling the task aborts
        all of them.

        An error of one prompt does not end the others: after all have ended, `PromptsFailedError`
        is raised, whose `results` has the texts and the errors. Raises `RequestError` at once for
        what cannot be meant, as a single text in the place of a list.
        """
        return await generate_all(
            lambda prompt, params, own: self.generate_one(prompt, params, **own),
            prompts,
            sampling_params,
            max_concurrency,
            fields,
        )

    async def score(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """Return how well each of `documents` fits the query, between 0 and 1, as a reranker model
        says; in their order. `instruction` is what makes a document fit, in words.
        """
        asked = ScoreRequest(
            model=self.model, text_1=query, text_2=list(documents), instruction=instruction
        )
        told = await self._connection.asked(ScoreList, "POST", "/v1/score", _encoder.encode(asked))
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
        told = await self._connection.asked(Ranking, "POST", "/v1/rerank", _encoder.encode(asked))
        return told.results

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
            async with self._connection.request("GET", "/ready"):
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

    def _shared(self, params: SamplingParams, *, is_given: bool) -> dict[str, Any]:
        """Fields of both endpoints that do not depend on the request. Defaults are not sent, but
        for those of parameters that are given and that the model would replace by its own.
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
            "model": self.model,
            "stream": is_stream or None,
            "stream_options": _STREAM_OPTIONS if is_stream else None,
            "return_token_ids": True,
        }

    async def _deltas(
        self,
        path: str,
        body: CompletionRequest | ChatCompletionRequest,
        decoder: msgspec.json.Decoder[Completion] | msgspec.json.Decoder[ChatCompletionChunk],
    ) -> AsyncGenerator[RequestOutput, None]:
        sent, first_tokens = time.monotonic(), dict[int, float]()
        async with self._connection.request("POST", path, _encoder.encode(body)) as response:
            async for data in _events(response.content):
                if data == b"[DONE]":
                    return
                if data.startswith(b'{"error"'):
                    info = self._connection.decoded(error_decoder, data, "an event").error
                    raise error_from_wire(500, info, response)
                chunk: Completion | ChatCompletionChunk = self._connection.decoded(
                    decoder, data, "an event"
                )
                for choice in chunk.choices:
                    if choice.token_ids is UNSET and choice.finish_reason is None:
                        continue  # it only says the role
                    output = _output(chunk, choice, body.prompt_logprobs)
                    if chunk.usage:  # of this sample so far
                        output.num_output_tokens = chunk.usage.completion_tokens
                    if output.token_ids and output.index not in first_tokens:
                        first_tokens[output.index] = time.monotonic()
                    if output.finished:
                        first = first_tokens.get(output.index)
                        output.times = RequestTimes(sent, time.monotonic(), first)
                    yield output
        broken = RequestFailedError(f"{self.base_url} ended the stream before the last output")
        raise with_id(broken, response)

    async def _whole(
        self,
        path: str,
        body: CompletionRequest | ChatCompletionRequest,
        decoder: msgspec.json.Decoder[Completion] | msgspec.json.Decoder[ChatCompletion],
    ) -> AsyncGenerator[RequestOutput, None]:
        sent = time.monotonic()
        async with self._connection.request("POST", path, _encoder.encode(body)) as response:
            data = await response.read()
        reply: Completion | ChatCompletion = self._connection.decoded(decoder, data)
        for choice in reply.choices:
            output = _output(reply, choice, body.prompt_logprobs)
            output.num_output_tokens = len(output.token_ids)
            output.times = RequestTimes(sent, time.monotonic())
            yield output


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each event. Splits by itself: aiohttp's line reader has a length limit."""
    rest = b""
    async for received in content.iter_any():
        *events, rest = (rest + received).split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: ")


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


# The connections of a client to one server: they raise errors from the wire struct of errors.


T = TypeVar("T")

error_decoder = msgspec.json.Decoder(ErrorResponse)


class Connection:
    """HTTP to the server at `base_url`. Its connections are opened by the first request."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float | None = None,  # seconds without a byte, waiting in its queue included
        connect_timeout: float = 10.0,
        api_key: str | None = None,  # one of the server's, or of what stands before it
        headers: Mapping[str, str] | None = None,  # of every request
    ) -> None:
        self._headers = dict(headers or {})
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.base_url = base_url.rstrip("/")
        self._socket_path = base_url[5:] if base_url.startswith("unix:") else None
        self._root = self.base_url if self._socket_path is None else "http://localhost"
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout, sock_read=timeout
        )
        self._open_session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections; streams that are still read end with an error."""
        if self._open_session is not None:
            await self._open_session.close()

    def session(self) -> aiohttp.ClientSession:
        if self._open_session is None:
            self._open_session = aiohttp.ClientSession(
                timeout=self._timeout,
                headers=self._headers,
                connector=(  # without a limit: the server says when it is full
                    aiohttp.TCPConnector(limit=0)
                    if self._socket_path is None
                    else aiohttp.UnixConnector(self._socket_path, limit=0)
                ),
            )
        return self._open_session

    def decoded(self, decoder: Any, data: bytes, what: str = "the answer") -> Any:
        try:
            return decoder.decode(data)
        except UNREADABLE as error:
            message = f"{what} of {self.base_url} cannot be read: {one_line(error)}"
            raise RequestFailedError(message) from error

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response; its connection is dropped if it was not read to the end."""
        if body is not None:  # as a file: aiohttp sends large ones in pieces
            options = {"data": io.BytesIO(body), "headers": {"Content-Type": "application/json"}}
        try:
            async with self.session().request(method, self._root + path, **options) as response:
                if response.status != 200:
                    raise _error_of(response, await response.read())
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = one_line(error)
            raise EngineDeadError(f"no answer from {self.base_url}: {reason}") from error

    async def asked(
        self, told: type[T], method: str, path: str, body: bytes | None = None, **options: Any
    ) -> T:
        """Return the whole answer of a route, as a struct."""
        async with self.request(method, path, body, **options) as response:
            data = await response.read()
        decoded: T = self.decoded(msgspec.json.Decoder(told), data)
        return decoded


def _error_of(response: aiohttp.ClientResponse, body: bytes) -> AioserveError:
    try:
        info = error_decoder.decode(body).error
    except UNREADABLE:  # not aioserve: a proxy, or another server
        text = body[:200].decode("utf-8", "replace").strip()
        message = f"HTTP {response.status} from {response.url}: {text or response.reason}"
        info = ErrorInfo(message=message, type="http_error")
    try:
        retry_after = float(response.headers.get("Retry-After", "1"))
    except ValueError:  # a date: nothing of ours sends one
        retry_after = 1.0
    retry_after = retry_after if 0 <= retry_after < inf else 1.0
    return error_from_wire(response.status, info, response, retry_after)


def error_from_wire(
    status: int, info: ErrorInfo, response: aiohttp.ClientResponse, retry_after: float = 1.0
) -> AioserveError:
    """Return the error in one line, whether this server sent it or a proxy in front of it."""
    lines = info.message.splitlines() or ["no message"]
    one = msgspec.structs.replace(info, message=" ".join(lines))
    return with_id(from_wire(status, one, retry_after), response)


def with_id(error: AioserveError, response: aiohttp.ClientResponse) -> AioserveError:
    """Add the request id of the server's log to an error; tracebacks show it."""
    if (request_id := response.headers.get("X-Request-Id")) is not None:
        error.request_id = request_id
        error.add_note(f"request id: {request_id}")
    return error


# Files and batches of a remote aioserve: `client.files`, `client.batches`.


_encoder = msgspec.json.Encoder()


class ClientFiles:
    """Files that the server keeps for batches, by `client.files`. All methods raise
    `RequestError`, also for a file that the server does not have or a server without batches.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(
        self,
        file: Path | bytes,
        *,
        filename: str | None = None,
        purpose: Literal["batch"] = "batch",
        expires_after_seconds: int | None = None,
    ) -> FileObject:
        """Upload a file, or its bytes: a request of a batch per line. It is deleted after
        `expires_after_seconds` (default: as the server says). Raises `OSError` for a file that
        cannot be read.
        """
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        if expires_after_seconds is not None:
            form.add_field("expires_after[anchor]", "created_at")
            form.add_field("expires_after[seconds]", str(expires_after_seconds))
        opened: BinaryIO
        if isinstance(file, Path):
            name, opened = file.name, await asyncio.to_thread(file.open, "rb")
        else:
            name, opened = "lines.jsonl", io.BytesIO(file)
        try:
            form.add_field(
                "file", opened, filename=filename or name, content_type="application/jsonl"
            )
            return await self._connection.asked(FileObject, "POST", "/v1/files", data=form)
        finally:
            opened.close()

    async def list(
        self,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> FileList:
        """Return one page of the files, the newest first, behind the file whose id is `after`."""
        page = FilesPage(after=after, limit=limit, order=order, purpose=purpose)
        return await self._connection.asked(FileList, "GET", _with_query("/v1/files", page))

    async def retrieve(self, file_id: str) -> FileObject:
        """Return what the server knows of a file."""
        return await self._connection.asked(FileObject, "GET", f"/v1/files/{_quoted(file_id)}")

    async def content(self, file_id: str) -> bytes:
        """Return all bytes of the file with that id."""
        path = f"/v1/files/{_quoted(file_id)}/content"
        async with self._connection.request("GET", path) as response:
            return await response.read()

    async def delete(self, file_id: str) -> FileDeleted:
        """Have the server forget a file; a batch that has begun with it goes on."""
        return await self._connection.asked(FileDeleted, "DELETE", f"/v1/files/{_quoted(file_id)}")


class ClientBatches:
    """Batches that the server runs, by `client.batches`. All methods raise `RequestError`, also
    for a batch that the server does not have or a server without batches.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(
        self,
        input_file_id: str,
        endpoint: Endpoint,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        output_expires_after_seconds: int | None = None,
    ) -> Batch:
        """Have the requests of a file run in the background on the route `endpoint`, until
        `completion_window` has passed: a number and s, m, h or d.
        """
        seconds = output_expires_after_seconds
        body = BatchRequest(
            input_file_id=input_file_id,
            endpoint=endpoint,
            completion_window=completion_window,
            metadata=None if metadata is None else dict(metadata),
            output_expires_after=(
                None if seconds is None else ExpiresAfter(anchor="created_at", seconds=seconds)
            ),
        )
        return await self._connection.asked(Batch, "POST", "/v1/batches", _encoder.encode(body))

    async def list(self, *, after: str | None = None, limit: int = 20) -> BatchList:
        """Return one page of the batches, the newest first, behind the batch whose id is
        `after`.
        """
        page = BatchesPage(after=after, limit=limit)
        return await self._connection.asked(BatchList, "GET", _with_query("/v1/batches", page))

    async def retrieve(self, batch_id: str) -> Batch:
        """Return a batch, and how far it is."""
        return await self._connection.asked(Batch, "GET", f"/v1/batches/{_quoted(batch_id)}")

    async def cancel(self, batch_id: str) -> Batch:
        """Have a batch end with the answers that it has."""
        return await self._connection.asked(
            Batch, "POST", f"/v1/batches/{_quoted(batch_id)}/cancel"
        )

    async def wait(self, batch_id: str, *, poll_seconds: float = 1.0) -> Batch:
        """The batch once it has ended, however it did: its `status` says that."""
        while True:
            batch = await self.retrieve(batch_id)
            if batch.has_ended:
                return batch
            await asyncio.sleep(poll_seconds)


def _quoted(given_id: str) -> str:
    return quote(given_id, safe="")


def _with_query(path: str, page: FilesPage | BatchesPage) -> str:
    given = msgspec.to_builtins(page)
    return f"{path}?{urlencode(given)}" if given else path
