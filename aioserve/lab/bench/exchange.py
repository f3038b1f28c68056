"""Sends a workload to any OpenAI-compatible server and notes what came back, and when.

Knows of the wire what it must: text or no text, usage, errors. Knows nothing about measures, nor
about aioserve's own server.
"""

import asyncio
import io
import time
from typing import Any, Literal

import aiohttp
import msgspec

from aioserve.errors import UNREADABLE, AioserveError
from aioserve.lab.simulation.outcome import RequestOutcome
from aioserve.lab.simulation.run import Clients, Progress
from aioserve.lab.workloads.workload import Workload, WorkloadRequest, build_prompt

# Common words, a token each for most tokenizers: prompts for servers that take no token ids.
_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this from "
    "or had by but some what there we can out other were all your when up use how said an each "
    "she which do their time if will way about many then them would like so these her long make"
)
WORDS = _TEXT.split()
LARGE_BODY = 1 << 20  # aiohttp warns of bytes longer than this: it writes them at once


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and how it is asked."""

    url: str
    model: str | None = None  # None: the first that the server names
    endpoint: Literal["completions", "chat"] = "completions"
    prompts: Literal["auto", "ids", "text"] = "auto"  # auto: ids if the server takes them
    vocab_size: int = 2000  # ids stay below
    extra_body: dict[str, Any] = {}  # laid over the fields of every request; null removes one
    headers: dict[str, str] = {}
    timeout: float = 600.0  # seconds without a byte


class Exchange(RequestOutcome):
    """One request and its answer. `token_times` are those of chunks with text in them."""

    __slots__ = ("error", "is_sent", "lateness", "num_prompt_tokens")

    def __init__(self) -> None:
        super().__init__()
        self.is_sent = False
        self.lateness = 0.0  # seconds from when it was due to when it was sent
        self.num_prompt_tokens = 0  # as the server counted; 0: it did not say
        self.error: tuple[str, str] | None = None  # its kind, and what was said


class ServerError(Exception):
    """An answer that is no reply: of a kind that can be counted, with what was said."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Attempt:
    """An attempt, which knows whether its request went over a connection that an earlier request
    had left open.
    """

    __slots__ = ("is_reused",)

    def __init__(self) -> None:
        self.is_reused = False


class NobodyThereError(AioserveError):
    """No connection could be made: thousands of requests would say the same."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content)))


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_models = msgspec.json.Decoder(_Models).decode
_encode = msgspec.json.Encoder().encode


class Load(Clients):
    """A workload on its way to a server; `exchanges` and totals can be read at any time."""

    def __init__(
        self, target: Target, workload: Workload, progress: Progress = lambda count: None
    ) -> None:
        super().__init__(workload, time.perf_counter, progress)
        workload.refuse_images("bench sends text alone")
        self.target = target
        self.exchanges = [Exchange() for _ in workload.requests]
        self.model = target.model
        self.sends_ids = target.endpoint == "completions" and target.prompts != "text"
        self.seconds = 0.0  # from the first request to the last answer
        self.cpu_seconds = 0.0  # of this process meanwhile
        self.is_cut = False

    async def run(
        self, *, warmup: tuple[WorkloadRequest, ...] = (), max_seconds: float | None = None
    ) -> None:
        """Send the load, and return after the last answer, or when `max_seconds` are over; errors
        are noted, not raised.

        `warmup` is sent before, all at once, and not noted. Raises `NobodyThereError`.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.target.timeout, sock_connect=30)
        async with aiohttp.ClientSession(
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
            headers=self.target.headers,
            auto_decompress=False,
            trace_configs=[_tracing_reuse()],
        ) as session:
            self._session = session
            await self._meet(warmup)
            self.start, cpu = self.clock(), time.process_time()
            try:
                async with asyncio.timeout(max_seconds):
                    await self.come()
            except TimeoutError:
                self.is_cut = True
            finally:  # also when interrupted
                self.seconds = self.clock() - self.start
                self.cpu_seconds = time.process_time() - cpu

    async def _meet(self, warmup: tuple[WorkloadRequest, ...]) -> None:
        """Learn whether a server is there, the model's name, and whether ids are taken; warm up."""
        try:
            async with self._session.get(f"{self.target.url}/v1/models") as response:
                body = await response.read()
                self.model = self.model or _decode_models(body).data[0].id
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NobodyThereError(f"{self.target.url}: {_kind(error)}") from error
        except (aiohttp.ClientError, TimeoutError, IndexError, *UNREADABLE):
            pass  # it may serve all the same; if not, each request says why
        if self.sends_ids and self.target.prompts == "auto" and self.workload.requests:
            first = msgspec.structs.replace(self.workload.requests[0], pieces=(), output_tokens=1)
            try:
                await self._send(first, [16, 17, 18, 19], Exchange())
            except ServerError as error:
                self.sends_ids = error.kind not in ("HTTP 400", "HTTP 422")
            except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
                pass
        prompts = [build_prompt(request, self.target.vocab_size, {}) for request in warmup]
        await asyncio.gather(
            *(self._send(r, p, Exchange()) for r, p in zip(warmup, prompts, strict=True)),
            return_exceptions=True,
        )

    async def ask(self, i: int, due: float) -> list[int]:
        request, exchange = self.workload.requests[i], self.exchanges[i]
        prompt = build_prompt(request, self.target.vocab_size, self.replies)
        exchange.is_sent = True
        exchange.arrival = self.clock() - self.start
        exchange.lateness = exchange.arrival + self.start - due
        reply: list[int] = []
        try:
            reply = await self._send(request, prompt, exchange, i in self.is_replied_to)
        except ServerError as error:
            exchange.error = error.kind, str(error)
        except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as error:
            exchange.error = _kind(error), str(error) or type(error).__name__
        exchange.end = self.clock() - self.start
        return reply

    async def _send(
        self,
        request: WorkloadRequest,
        prompt: list[int],
        exchange: Exchange,
        wants_ids: bool = False,
    ) -> list[int]:
        """Return the ids of the reply, if they were asked for and the server tells them."""
        path = "chat/completions" if self.target.endpoint == "chat" else "completions"
        body = _encode(self._body(request, prompt, wants_ids))
        while True:
            attempt = _Attempt()
            try:
                response = await self._session.post(
                    f"{self.target.url}/v1/{path}",
                    data=body if len(body) < LARGE_BODY else io.BytesIO(body),
                    headers={"Content-Type": "application/json"},
                    trace_request_ctx=attempt,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if attempt.is_reused:  # the server had closed an idle connection: RFC 9112, 9.3.1
                    continue
                raise
            async with response:
                if response.status != 200:
                    text = (await response.read())[:500].decode("utf-8", "replace")
                    raise ServerError(f"HTTP {response.status}", text)
                return await self._read(response.content, exchange)

    def _body(self, request: WorkloadRequest, prompt: list[int], wants_ids: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "priority": request.priority or None,
            "user": request.user or None,
            "hints": request.hints or None,
            "timeout": request.timeout,
            "return_token_ids": wants_ids or None,
        }
        if self.sends_ids:
            body["prompt"] = prompt
        else:
            text = " ".join(WORDS[token % len(WORDS)] for token in prompt)
            if self.target.endpoint == "chat":
                body["messages"] = [{"role": "user", "content": text}]
            else:
                body["prompt"] = text
        body |= self.target.extra_body
        return {name: value for name, value in body.items() if value is not None}

    async def _read(self, content: aiohttp.StreamReader, exchange: Exchange) -> list[int]:
        """Read events to the end. Raises `ServerError` for what is no reply."""
        token_ids: list[int] = []
        rest = b""
        async for received in content.iter_any():
            now = self.clock() - self.start
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:") or line.startswith((b"data: [D", b"data:[D")):
                    continue  # between events, a comment, or [DONE]
                chunk = _decode_chunk(line[5:])
                for choice in chunk.choices:
                    if choice.has_text():
                        exchange.token_times.append(now)
                    token_ids += choice.token_ids or ()
                    exchange.finish_reason = choice.finish_reason or exchange.finish_reason
                if chunk.usage is not None:
                    exchange.num_prompt_tokens = chunk.usage.prompt_tokens
                    exchange.num_output_tokens = chunk.usage.completion_tokens
                    details = chunk.usage.prompt_tokens_details
                    exchange.num_cached_tokens = (details and details.cached_tokens) or 0
                if chunk.error and bytes(chunk.error) != b"null":
                    raise ServerError("error event", bytes(chunk.error).decode("utf-8", "replace"))
        if not exchange.finish_reason:
            raise ServerError("cut off", "the stream ended without a finish reason")
        if not exchange.is_finished:
            reason = exchange.finish_reason
            raise ServerError(f"finish reason {reason}", "ended before its last token")
        return token_ids


def _tracing_reuse() -> aiohttp.TraceConfig:
    async def note(_: aiohttp.ClientSession, context: Any, __: object) -> None:
        if isinstance(context.trace_request_ctx, _Attempt):
            context.trace_request_ctx.is_reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(note)
    return config


def _kind(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return "connection refused" if refused else "cannot connect"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "not JSON" if isinstance(error, UNREADABLE) else "disconnected"
