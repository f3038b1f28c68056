"""From a decoded request to its response: admission, streaming or collecting, usage.

What all routes share that generate. How a delta looks on the wire is the business of an `Answer`.
"""

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import HttpVersion11, web

from aioserve.engine import Prompt, RequestStream
from aioserve.errors import AioserveError, RequestError
from aioserve.outputs import RequestOutput
from aioserve.params import SamplingParams
from aioserve.request import NO_HINTS, Hints
from aioserve.server.access.gate import allowed_fields, entered, estimated_tokens, owner_of
from aioserve.server.access.keys import Claim, Leave
from aioserve.server.body import BodyDecoder, check_stream_options, decode_body
from aioserve.server.errors import to_wire
from aioserve.server.fields import PASSED_OVER
from aioserve.server.images import Shown
from aioserve.server.protocol import Choice, Envelope, GenerationRequest, Usage
from aioserve.server.running import ENGINE, RESPONSE_ID, RUNNING, TOKEN_TEXTS, check_id


class Tally:
    """Token counts of all prompts and samples of one HTTP request."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._num_prompt_tokens = sum(stream.num_prompt_tokens for stream in streams)
        self._num_output_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}

    def note(self, index: int, output: RequestOutput) -> None:
        """The next delta of choice `index`."""
        self._num_output_tokens[index] = output.num_output_tokens
        if output.index == 0:  # the other samples may have found the first one's blocks
            self._num_cached_tokens[index] = output.num_cached_tokens

    def usage(self) -> Usage:
        """Token counts of all prompts and samples so far."""
        return Usage.of(
            self._num_prompt_tokens,
            sum(self._num_output_tokens.values()),
            sum(self._num_cached_tokens.values()),
        )


# Server-sent events: how a struct becomes an event, and a response that starts with the first.
# Knows nothing about what the events say.


EVENTS = "text/event-stream"
MOST_HELD = 65_536  # bytes that choices of one response hold back within a turn of the loop
DONE = b"data: [DONE]\n\n"

MOST_KEPT = 1024  # ends of events that replies of one model share
_kept: dict[tuple[Any, ...], bytes] = {}  # by what they are the ends of

_encoder = msgspec.json.Encoder()
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


def event(struct: Any) -> bytes:
    """Return a struct as one server-sent event, without a name."""
    return b"data: " + _encoder.encode(struct) + b"\n\n"


def typed_event(struct: Any) -> bytes:
    """Return one event that is named as its struct's `type` says."""
    name: str = struct.type
    return b"event: " + name.encode() + b"\n" + event(struct)


class _Chunked(web.Response):
    """A response in chunks, whose head leaves in one piece with the first of them: that of a
    `web.StreamResponse` takes a call to the system of its own.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        self.enable_chunked_encoding()

    async def write_eof(self, data: bytes = b"") -> None:
        await web.StreamResponse.write_eof(self, data)


class EventStream:
    """A streamed response that sends its headers with its first event.

    Until then a failure can still be answered with a status code of its own.
    """

    def __init__(
        self, request: web.Request, media_type: str = EVENTS, *, is_shared: bool = False
    ) -> None:
        """`is_shared`: several choices write in one turn of the loop; it leaves in one piece."""
        self._request = request
        self._headers = {"Content-Type": media_type, **_HEADERS}
        self._response: web.StreamResponse | None = None
        self._is_chunked = False  # it has begun, has not ended, and the client knows HTTP/1.1
        self._is_shared = is_shared
        self._held: list[bytes] = []  # chunks of this turn of the loop, if it is shared
        self._num_held = 0  # bytes of them

    @property
    def started(self) -> bool:
        """Whether the client has seen a status code."""
        return self._response is not None

    @property
    def has_room(self) -> bool:
        """Whether something can be written at once."""
        protocol = self._request.protocol
        is_open = protocol.transport is not None and not protocol.transport.is_closing()
        return self._is_chunked and is_open and not protocol.writing_paused

    async def send(self, events: bytes) -> None:
        """Write whole events; waits while the client's socket is full."""
        response = await self._begun()
        await response.write(events)
        self._is_chunked = isinstance(response, _Chunked)

    def write(self, events: bytes) -> None:
        """Write whole events, perhaps none, while it `has_room`.

        The same bytes as `send`, without the five calls and two coroutines of aiohttp's way down.
        """
        transport = self._request.transport
        if events and transport is not None:
            write = self._hold if self._is_shared else transport.write
            write(b"%x\r\n%b\r\n" % (len(events), events))

    def text_writer(self, before: bytes, after: bytes) -> Callable[[str], bool] | None:
        """Return what writes the event of a text at once, between what stands before it and after
        it, or nothing for an empty one. It returns False, and writes nothing, while the stream has
        no room. None: this stream has to `send`.

        Most tokens leave by it, so all that stays the same is looked up here.
        """
        transport = self._request.transport
        if transport is None or not self._is_chunked:
            return None
        protocol, is_closing = self._request.protocol, transport.is_closing
        write = self._hold if self._is_shared else transport.write
        encode, length = _encoder.encode, len(before) + len(after)

        def take(text: str) -> bool:
            if not self._is_chunked or is_closing() or protocol.writing_paused:
                return False
            if text:
                told = encode(text)
                write(b"%x\r\n%b%b%b\r\n" % (length + len(told), before, told, after))
            return True

        return take

    async def end(self, events: bytes) -> web.StreamResponse:
        """Write the last events and close the stream, in one piece."""
        response = await self._begun()
        self._is_chunked = False
        await response.write_eof(events)
        return response

    async def _begun(self) -> web.StreamResponse:
        """Return the response, to which all that is held was written."""
        if self._response is None:
            make = _Chunked if self._request.version == HttpVersion11 else web.StreamResponse
            self._response = make(headers=self._headers)
            await self._response.prepare(self._request)
        if self._held:
            self._let_go()
        return self._response

    def _hold(self, chunk: bytes) -> None:
        if not self._held:
            asyncio.get_running_loop().call_soon(self._let_go)
        self._held.append(chunk)
        self._num_held += len(chunk)
        if self._num_held > MOST_HELD:  # so that a turn of many texts finds out what is full
            self._let_go()

    def _let_go(self) -> None:
        """Write what is held; it is dropped where the client has gone. The stream ends where it
        cannot be written: what follows would have a hole before it.
        """
        held, self._held, self._num_held = self._held, [], 0
        transport = self._request.transport
        if not held or transport is None or transport.is_closing():
            return
        try:
            transport.write(b"".join(held))
        except Exception:
            logger.exception("a stream ends, as it cannot be written")
            self._is_chunked = False
            transport.abort()


logger = logging.getLogger(__name__)

PROMPT_END_TOKENS = 16  # no mark of a chat template is longer


T = TypeVar("T", bound=GenerationRequest)


class Asked(Protocol):
    """The wishes of a body about how its requests run and are answered."""

    stream: bool | None

    def request_fields(self) -> dict[str, Any]:
        """Keyword arguments of `AsyncEngine.add_request`, but for the id."""


class Answer(ABC):
    """The form in which one request's outputs become bytes: what its route calls a delta, an end
    and an error.
    """

    id_prefix: str
    text_field: str  # of a delta's event: what its text is called
    says_more = False  # in every delta than its text
    media_type = EVENTS  # of a stream

    def __init__(self, request: web.Request, model: str | None, given_id: str | None) -> None:
        self.id = f"{self.id_prefix}{os.urandom(16).hex()}" if given_id is None else given_id
        self.model = model or request.app[ENGINE].config.model.served_name
        self.prompts: Sequence[Sequence[int]] = ()  # their tokens, known when they are accepted
        self.hints: Hints = NO_HINTS  # what the policy is told of the request
        # By choice: the event of a delta that is text alone, without that text.
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @property
    def prompt_end(self) -> Sequence[int]:
        """The last tokens of the (first) prompt: a chat template may begin the reply with them."""
        return self.prompts[0][-PROMPT_END_TOKENS:] if self.prompts else ()

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        """Return the events, perhaps none, that tell the next delta of choice `index`."""
        if (quick := self.quick_chunk(index, output)) is not None:
            return quick
        if self.is_silent(output):
            return b""
        chunk = self.make_chunk(index, output)
        if index not in self._frames and not self.says_more and output.logprobs is None:
            self._frames[index] = self._frame(index)
        return chunk

    def quick_chunk(self, index: int, output: RequestOutput) -> bytes | None:
        """Return `chunk` of a delta of text alone after the first of its choice; else None."""
        frame = self._frames.get(index)
        if frame is None or output.finish_reason is not None:
            return None
        if not output.text:
            return b""
        return frame[0] + _encoder.encode(output.text) + frame[1]

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Return what stands before and after the text of a delta of choice `index` that is text
        alone; None before its first delta, or if its deltas say more.
        """
        return self._frames.get(index)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        chunk = self._text_chunk(index)
        name = f'"{self.text_field}":'.encode()
        # Inside a JSON string every quote is escaped: only the field itself can look like this.
        before, after = chunk.split(name + rb'"\u0000"')
        return before + name, after

    def _text_chunk(self, index: int) -> bytes:
        return self.make_chunk(index, RequestOutput(request_id=self.id, text="\0"))

    async def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Called once, when the request is accepted and nothing of it was told yet."""

    settles_elsewhere = False  # whether `settle` may wait, as for a store

    async def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Called once, when the end was made and is not told yet."""

    @abstractmethod
    def make_chunk(self, index: int, output: RequestOutput) -> bytes:
        """Return the events that tell a delta which is not silent."""

    @abstractmethod
    def ending(self, usage: Usage) -> bytes:
        """Return the last events of a stream."""

    @abstractmethod
    def failure(self, error: BaseException) -> bytes:
        """Return the last events of a stream that has failed."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> msgspec.Struct:
        """Return the body of a response that is not streamed; outputs in the order of choices."""

    def is_silent(self, output: RequestOutput) -> bool:
        """Return whether a delta says nothing yet: its text is held back."""
        return not (
            output.text
            or output.finish_reason is not None
            or output.logprobs
            or output.prompt_logprobs
        )


class Reply(Answer):
    """An answer in OpenAI's words. Holds what its chunks have in common."""

    def __init__(self, request: web.Request, body: GenerationRequest) -> None:
        super().__init__(request, body.model, body.request_id)
        options = body.stream_options
        self.created = int(time.time())
        self.texts = request.app[TOKEN_TEXTS]
        self.return_token_ids = bool(body.return_token_ids)
        self.include_usage = bool(
            (options and options.include_usage) or (body.usage and body.usage.include)
        )
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self.says_more = self.continuous_usage or self.return_token_ids

    def kept(self, what: str, index: int, make: Callable[[int], bytes]) -> bytes:
        """Return `make(index)`, an event of which id and time alone are this request's own, and
        stand first: the rest is made once for a model. `what` tells such events apart.
        """
        begin = b'data: {"id":%b,"created":%d,' % (_encoder.encode(self.id), self.created)
        key = what, type(self), self.model, self.include_usage, index
        rest = _kept.get(key)
        if rest is None:
            first, _, rest = make(index).partition(begin)
            assert not first, "an event begins with id and time"
            if len(_kept) >= MOST_KEPT:
                _kept.clear()
            _kept[key] = rest
        return begin + rest

    def _text_chunk(self, index: int) -> bytes:
        return self.kept("text", index, super()._text_chunk)

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event that tells the usage of the whole request."""

    def ending(self, usage: Usage) -> bytes:
        return self.usage_chunk(usage) + DONE if self.include_usage else DONE

    def failure(self, error: BaseException) -> bytes:
        return event(to_wire(error)[1])

    def is_silent(self, output: RequestOutput) -> bool:
        return super().is_silent(output) and not (self.return_token_ids and output.token_ids)

    def extend(self, choice: Choice, output: RequestOutput) -> None:
        """Add the extensions that were asked for."""
        if output.stop_reason is not None:
            choice.stop_reason = output.stop_reason
        if self.return_token_ids:
            choice.token_ids = output.token_ids
            if output.logprobs is not None:
                choice.raw_logprobs = output.logprobs

    def add_usage(self, chunk: Envelope, output: RequestOutput) -> None:
        """Say the sample's usage so far, or null, as `stream_options` asks."""
        if self.continuous_usage:
            chunk.usage = Usage.of(
                output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens
            )
        elif self.include_usage:
            chunk.usage = None


async def read_body(request: web.Request, decoder: BodyDecoder[T]) -> T:
    """Return the decoded body. Raises `RequestError`; `UnknownModelError` for a model that is not
    here.
    """
    body = await decode_body(request, decoder)
    check_stream_options(body)
    if body.detokenize is False and not body.return_token_ids:
        raise RequestError(
            "detokenize false needs return_token_ids true, or nothing comes back",
            param="detokenize",
        )
    return body


async def respond(
    request: web.Request,
    body: Asked,
    prompts: Sequence[Prompt | Shown],
    params: SamplingParams,
    reply: Answer,
    best_of: int | None = None,
) -> web.StreamResponse:
    """Run `prompts` together, their images brought first, and answer as `body` asks. With
    `best_of`, that number of samples is drawn per prompt; the `n` best are told, not in a stream.

    Leaving, by an error or because the client went away, aborts what is unfinished.
    """
    check_id(reply.id)
    request[RESPONSE_ID] = reply.id
    _log_passed_over(request, reply.id)
    engine = request.app[ENGINE]
    if not body.stream:  # no client reads a delta: none is made
        params = params.with_checked(output_kind="final_only")
    ids = [reply.id] if len(prompts) == 1 else [f"{reply.id}-{i}" for i in range(len(prompts))]
    wanted = params
    if best_of is not None and best_of > params.n:
        # What is best, log probabilities tell.
        params = msgspec.structs.replace(params, n=best_of, logprobs=params.logprobs or 0)
    fields = allowed_fields(request, body)
    reply.hints = fields.get("hints", NO_HINTS)
    streams: list[RequestStream] = []
    async with entered(
        request, lambda: _claim(reply.id, prompts, params, engine.max_model_len)
    ) as leave:
        running = request.app[RUNNING].enter(reply.id, ids, owner_of(request))
        with running as response, ExitStack() as closing:
            for request_id, prompt in zip(ids, prompts, strict=True):
                stream = await engine.add_request(
                    await prompt.bring(engine) if isinstance(prompt, Shown) else prompt,
                    params,
                    request_id=request_id,
                    adapter=reply.model,
                    **fields,
                )
                closing.callback(stream.close)
                streams.append(stream)
                if response.is_aborted:  # while another prompt was being tokenized
                    engine.abort_now(request_id)
            reply.prompts = [stream.prompt_token_ids for stream in streams]
            await reply.begin()
            if body.stream:
                return await _stream(request, streams, params, reply, leave)
            return await _collect(streams, params.n, reply, wanted)


def _log_passed_over(request: web.Request, request_id: str) -> None:
    """Say in one line what was passed over, if anything was."""
    if what := request.get(PASSED_OVER):
        logger.info(
            "%s: passed over, since only a vendor's servers do it: %s", request_id, ", ".join(what)
        )


def _claim(
    request_id: str, prompts: Sequence[Prompt | Shown], params: SamplingParams, max_model_len: int
) -> Claim:
    """Return what a body may take of its key's limits: all of its samples, as long as they
    may get.
    """
    num_sequences, num_tokens = len(prompts) * params.n, 0
    for prompt in prompts:
        num_own = estimated_tokens(prompt)
        room = max(max_model_len - num_own, 0)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        num_tokens += num_own + most * params.n
    return Claim(num_sequences, num_tokens, num_sequences == 1, request_id)


async def _stream(
    request: web.Request,
    streams: Sequence[RequestStream],
    params: SamplingParams,
    reply: Answer,
    leave: Leave,
) -> web.StreamResponse:
    n, tally = params.n, Tally(streams)
    num_live, last = len(streams) * n, b""
    events = EventStream(request, reply.media_type, is_shared=num_live > 1)

    async def pump(first_index: int, stream: RequestStream) -> None:
        nonlocal num_live, last
        framed: set[int] = set()  # samples whose texts are written as they come

        def write(output: RequestOutput) -> bool:
            if not events.has_room:
                return False
            chunk = reply.quick_chunk(first_index + output.index, output)
            if chunk is None:
                return False
            events.write(chunk)
            return True

        if params.prompt_logprobs is None:  # else the first delta is told beside the loop
            stream.offer_to(write)
        async for output in stream:
            index = first_index + output.index
            tally.note(index, output)
            is_last = False
            if output.finish_reason is not None:
                num_live -= 1
                if is_last := not num_live:  # the client may ask again as soon as it has read this
                    await leave()
            if output.prompt_logprobs is None:  # most: `_told`, without its coroutine
                chunk = reply.chunk(index, output)
            else:
                chunk = await _told(reply.chunk, index, output, outputs=[output])
            if is_last:  # of all choices: it leaves with what ends the stream
                last = chunk
            elif chunk:
                await events.send(chunk)
            if index not in framed and (frame := reply.frame(index)) is not None:
                framed.add(index)
                if (take := events.text_writer(*frame)) is not None:
                    stream.offer_texts_to(output.index, take)

    try:
        await run_all([pump(i * n, stream) for i, stream in enumerate(streams)])
        ending = reply.ending(tally.usage())
        if last and reply.settles_elsewhere:
            await events.send(last)  # the client need not wait for it
            last = b""
        await reply.settle()
    except ConnectionError:
        raise  # the client has gone: it cannot be told
    except Exception as error:
        if not events.started:
            raise
        if not isinstance(error, AioserveError):
            logger.exception("%s failed while streaming", reply.id)
        await leave()
        return await events.end(last + reply.failure(error))
    return await events.end(last + ending)


async def _collect(
    streams: Sequence[RequestStream], n: int, reply: Answer, wanted: SamplingParams
) -> web.Response:
    found: dict[int, RequestOutput] = {}
    tally = Tally(streams)

    async def drain(first_index: int, stream: RequestStream) -> None:
        async for output in stream:  # one of each sample, at its end
            index = first_index + output.index
            tally.note(index, output)
            found[index] = output

    await run_all([drain(i * n, stream) for i, stream in enumerate(streams)])
    outputs = [found[index] for index in range(len(streams) * n)]
    for index, output in enumerate(outputs):  # how likely a prompt was, its first sample tells
        output.prompt_logprobs = outputs[index - index % n].prompt_logprobs
    if wanted.n < n:
        from aioserve.server.logprobs import best_outputs

        samples = [outputs[begin : begin + n] for begin in range(0, len(outputs), n)]
        outputs = [output for own in samples for output in best_outputs(own, wanted)]
    body = await _told(
        lambda: _encoder.encode(reply.whole(outputs, tally.usage())), outputs=outputs
    )
    await reply.settle()
    return web.Response(body=body, content_type="application/json")


async def _told(tell: Callable[..., bytes], *args: Any, outputs: Sequence[RequestOutput]) -> bytes:
    """`outputs` as bytes. Those with long prompts and many alternatives take as long as steps do:
    they are told in a thread.
    """
    if all(output.prompt_logprobs is None for output in outputs):
        return tell(*args)
    return await asyncio.to_thread(tell, *args)


async def run_all(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run together; the first error cancels the rest and is raised as it is."""
    if len(coroutines) == 1:  # the usual case needs no second task
        return await coroutines[0]
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
