"""What is written for a delta by the quick way is what the struct says, byte for byte."""

import asyncio
import json

import msgspec
import pytest
from aiohttp import HttpVersion, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import StreamWriter
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from aioserve.engine.chat.chat_format import ChatFormat
from aioserve.outputs import FinishReason, RequestOutput, TokenLogprobs
from aioserve.params import SamplingParams
from aioserve.server.chat.protocol import ChatCompletionChunk, ChatCompletionRequest
from aioserve.server.chat.routes import ChatReply
from aioserve.server.completions import CompletionReply
from aioserve.server.generation import MOST_HELD, EventStream, Reply
from aioserve.server.logprobs import best_outputs
from aioserve.server.protocol import Completion, CompletionRequest, StreamOptions
from aioserve.server.running import CHAT_FORMAT, TOKEN_TEXTS
from aioserve.support.tokens import TokenTexts

# A name that looks like the fields it stands next to.
MODEL = '"text":"\0","content":"\0"'


def make_reply(chat: bool = False, **fields) -> Reply:
    app = web.Application()
    app[TOKEN_TEXTS] = TokenTexts(None)
    app[CHAT_FORMAT] = ChatFormat(None, "none", "none")
    request = make_mocked_request("POST", "/", app=app)
    if chat:
        return ChatReply(request, ChatCompletionRequest(model=MODEL, messages=[], **fields))
    return CompletionReply(request, CompletionRequest(model=MODEL, prompt="", **fields))


def delta(text: str, **fields) -> RequestOutput:
    return RequestOutput(request_id="r", text=text, token_ids=[1], **fields)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(0, 9))
@pytest.mark.parametrize("include_usage", [None, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a_quick_chunk_is_the_chunk_byte_for_byte(chat, include_usage, text, index):
    reply = make_reply(chat, stream_options=StreamOptions(include_usage=include_usage))
    assert reply.quick_chunk(index, delta(text)) is None  # the first one may have more to say
    reply.chunk(index, delta("first"))
    quick = reply.quick_chunk(index, delta(text))
    assert quick == reply.make_chunk(index, delta(text)) == reply.chunk(index, delta(text))
    chunk = msgspec.json.decode(quick[6:], type=ChatCompletionChunk if chat else Completion)
    choice = chunk.choices[0]
    assert (choice.index, chunk.model) == (index, MODEL)
    assert (choice.delta.content if chat else choice.text) == text


@pytest.mark.parametrize("chat", [False, True])
def test_neither_id_nor_time_is_kept_for_another_request(chat):
    for own_id, created in (("a", 1), ('"b"', 1_800_000_000)):
        reply = make_reply(chat, request_id=own_id)
        reply.created = created
        told = reply.chunk(0, delta("first")) + reply.chunk(0, delta("second"))
        events = [json.loads(event[6:]) for event in told.split(b"\n\n")[:-1]]
        assert len(events) == 2 + chat
        assert {(event["id"], event["created"]) for event in events} == {(own_id, created)}


def test_the_best_samples_have_the_most_likely_tokens_on_average():
    def sample(*logprobs: float) -> RequestOutput:
        return delta("", logprobs=[TokenLogprobs(value, 1, [], []) for value in logprobs])

    long, poor, best = sample(-0.5, -0.5, -0.5), sample(-1.0), sample(-0.1, -0.5)
    found = best_outputs([long, poor, best], SamplingParams(n=2, logprobs=0))
    assert found == [best, long]
    (found,) = best_outputs([delta(""), poor], SamplingParams())
    assert found == msgspec.structs.replace(poor, logprobs=None)


@pytest.mark.parametrize("chat", [False, True])
def test_a_delta_whose_text_is_held_back_says_nothing(chat):
    reply = make_reply(chat)
    assert reply.chunk(0, delta("")) == b""
    assert reply.quick_chunk(0, delta("")) is None
    reply.chunk(0, delta("first"))
    assert reply.quick_chunk(0, delta("")) == b""


@pytest.mark.parametrize("chat", [False, True])
def test_a_last_delta_is_never_quick(chat):
    reply = make_reply(chat)
    reply.chunk(0, delta("first"))
    last = delta("last", finish_reason=FinishReason.STOP, stop_reason=7)
    assert reply.quick_chunk(0, last) is None
    assert b'"stop_reason":7' in reply.chunk(0, last)


@pytest.mark.parametrize(
    "fields",
    [{"return_token_ids": True}, {"stream_options": StreamOptions(continuous_usage_stats=True)}],
    ids=["token ids", "usage"],
)
@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_that_says_more_than_text_is_never_quick(chat, fields):
    reply = make_reply(chat, **fields)
    reply.chunk(0, delta("first"))
    assert reply.quick_chunk(0, delta("second")) is None
    assert b"second" in reply.chunk(0, delta("second"))


def test_a_stream_with_logprobs_is_never_quick():
    class Tokenizer:
        def decode(self, token_ids: list[int]) -> str:
            return "t"

    reply = make_reply()
    reply.texts = TokenTexts(Tokenizer())
    logprobs = [TokenLogprobs(-1.0, 1, [], [])]
    for text in ("first", "second"):
        assert reply.quick_chunk(0, delta(text, logprobs=logprobs)) is None
        assert b'"token_logprobs":[-1.0]' in reply.chunk(0, delta(text, logprobs=logprobs))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_is_framed_as_the_clients_http_version_says(server, version):

    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 40, "ignore_eos": True})
    whole = (await server.complete("Hi", max_tokens=40, ignore_eos=True)).json()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    headers, _, stream = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    if version == "1.1":
        assert b"transfer-encoding: chunked" in headers.lower()
        stream = unchunked(stream)
    *events, done, end = stream.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)
    assert text == whole["choices"][0]["text"]


class Pipe(asyncio.Transport):
    """The end of a connection whose client reads nothing: what is written stays."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = self.is_broken = False
        self.protocol: Connection

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.writes))

    def write(self, data: bytes) -> None:
        """Keep the data; as of transports, beyond 400 bytes the protocol is told to pause."""
        if self.is_broken:
            raise RuntimeError("it cannot be written")
        self.writes.append(data)
        if self.get_write_buffer_size() > 400 and not self.protocol.writing_paused:
            self.protocol.pause_writing()

    def abort(self) -> None:
        self.is_closed = True

    def let_read(self) -> None:
        """Have the client read all."""
        self.writes.clear()
        if self.protocol.writing_paused:
            self.protocol.resume_writing()


class Connection(BaseProtocol):
    """A connection with the attributes that a request looks at."""

    writer: StreamWriter  # which `make_mocked_request` sets
    peername = sockname = ssl_context = None


def make_stream(*, is_shared: bool = False, version: str = "1.1") -> tuple[EventStream, Pipe]:
    """Return a stream of which nothing was sent yet, and the pipe."""
    pipe = Pipe()
    pipe.protocol = protocol = Connection(asyncio.get_running_loop())
    protocol.transport = pipe
    writer = StreamWriter(protocol, asyncio.get_running_loop())
    request = make_mocked_request(
        *("POST", "/"),
        version=HttpVersion(*map(int, version.split("."))),
        transport=pipe,
        protocol=protocol,
        writer=writer,
    )
    return EventStream(request, is_shared=is_shared), pipe


async def begun(*, is_shared: bool = False, version: str = "1.1") -> tuple[EventStream, Pipe]:
    """Return a stream whose first event was sent, and the pipe, which is empty."""
    stream, pipe = make_stream(is_shared=is_shared, version=version)
    assert stream.text_writer(b"", b"") is None  # no client knows yet how it is framed
    await stream.send(b"data: 1\n\n")
    pipe.writes.clear()
    return stream, pipe


@pytest.mark.parametrize("version", ["1.0", "1.1", "2.0"])
async def test_the_head_comes_before_the_first_event_in_every_version(version):
    stream, pipe = make_stream(version=version)
    await stream.send(b"data: 1\n\n")
    head, _, body = b"".join(pipe.writes).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/{version} 200 OK".encode())
    assert b"data: 1\n\n" in body


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(0, 9))
@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_writer_writes_the_chunk_byte_for_byte(chat, text, index):
    reply = make_reply(chat)
    assert reply.frame(index) is None
    reply.chunk(index, delta("first"))
    stream, pipe = await begun()
    take = stream.text_writer(*reply.frame(index))
    assert take("")  # it is held back: nothing is said of it
    assert pipe.writes == []
    assert take(text)
    assert len(pipe.writes) == 1
    assert unchunked(pipe.writes[0] + b"0\r\n\r\n") == reply.make_chunk(index, delta(text))


async def test_a_text_writer_stops_at_a_full_socket_and_behind_the_end():
    stream, pipe = await begun()
    take = stream.text_writer(b"data: ", b"\n\n")
    while take("x" * 99):
        assert len(pipe.writes) < 9
    assert 400 < pipe.get_write_buffer_size() < 520
    pipe.let_read()
    assert take("x")
    pipe.is_closed = True
    assert not take("x")
    pipe.is_closed = False
    await stream.end(b"data: [DONE]\n\n")
    pipe.writes.clear()
    assert not take("x")
    assert pipe.writes == []
    stream, _ = await begun(version="1.0")  # without chunks
    assert stream.text_writer(b"", b"") is None


async def test_a_shared_stream_leaves_in_one_write_a_turn_and_in_order():
    stream, pipe = await begun(is_shared=True)
    takers = [stream.text_writer(b"data: %d" % i, b"\n\n") for i in range(3)]
    for text in ("a", "b"):
        assert all(take(text) for take in takers)
    stream.write(b"data: 3\n\n")
    assert pipe.writes == []
    await asyncio.sleep(0)
    events = [b'data: %d"%b"\n\n' % (i, text) for text in (b"a", b"b") for i in range(3)]
    assert len(pipe.writes) == 1
    assert unchunked(pipe.writes[0] + b"0\r\n\r\n") == b"".join([*events, b"data: 3\n\n"])
    pipe.writes.clear()
    assert takers[0]("c")
    await stream.end(b"data: [DONE]\n\n")  # behind what is held
    assert unchunked(b"".join(pipe.writes)) == b'data: 0"c"\n\ndata: [DONE]\n\n'
    pipe.writes.clear()
    await asyncio.sleep(0)
    assert pipe.writes == []


async def test_a_shared_stream_that_takes_much_within_a_turn_finds_out_what_is_full():
    stream, pipe = await begun(is_shared=True)
    take = stream.text_writer(b"data: ", b"\n\n")
    taken = 0
    while take("x" * 999):
        taken += 1
        assert taken < 100
    assert len(pipe.writes) == 1
    assert MOST_HELD < pipe.get_write_buffer_size() < MOST_HELD + 1100


async def test_a_shared_stream_that_cannot_be_written_ends_with_no_hole(caplog):
    stream, pipe = await begun(is_shared=True)
    take = stream.text_writer(b"data: ", b"\n\n")
    pipe.is_broken = True
    assert take("a")
    await asyncio.sleep(0)
    assert pipe.is_closing()
    pipe.is_broken = False
    assert not take("b")
    assert pipe.writes == []
    assert "a stream ends, as it cannot be written" in caplog.text


@pytest.mark.parametrize("is_all", [False, True])
async def test_the_head_leaves_with_the_first_events_in_one_write(is_all):
    stream, pipe = make_stream()
    await (stream.end if is_all else stream.send)(b"data: 1\n\n")
    [told] = pipe.writes
    head, _, body = told.partition(b"\r\n\r\n")
    names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
    known = b"content-type cache-control x-accel-buffering transfer-encoding date server"
    assert names == known.split()
    assert body == b"9\r\ndata: 1\n\n\r\n" + b"0\r\n\r\n" * is_all


async def test_the_last_events_and_the_end_leave_in_one_write():
    stream, pipe = await begun()
    await stream.end(b"data: [DONE]\n\n")
    assert pipe.writes == [b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]


@pytest.mark.parametrize("n", [1, 3])
async def test_the_last_delta_leaves_with_the_end(server, n, monkeypatch):
    ends = []
    end = EventStream.end

    async def noted(stream: EventStream, events: bytes) -> web.StreamResponse:
        ends.append(events)
        return await end(stream, events)

    monkeypatch.setattr(EventStream, "end", noted)
    answer = await server.complete("Hi", n=n, max_tokens=5, ignore_eos=True, stream=True)
    reasons = [event["choices"][0]["finish_reason"] for event in answer.events()]
    assert reasons.count("length") == n
    assert reasons[-1] == "length"
    [told] = ends
    assert told.count(b'"finish_reason":"length"') == 1
    assert told.endswith(b"}\n\ndata: [DONE]\n\n")


async def test_choices_of_one_response_leave_in_one_write_a_step(server, monkeypatch):
    writes = []
    let_go = EventStream._let_go

    def noted(stream: EventStream) -> None:
        writes.append(len(stream._held))
        let_go(stream)

    monkeypatch.setattr(EventStream, "_let_go", noted)
    whole = (await server.complete("Hi", n=4, max_tokens=40, ignore_eos=True, seed=1)).json()
    answer = await server.complete("Hi", n=4, max_tokens=40, ignore_eos=True, seed=1, stream=True)
    texts = ["", "", "", ""]
    for event in answer.events():
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert writes.count(4) > 20


def unchunked(data: bytes) -> bytes:
    """Strictly: sizes are those of the pieces, and nothing follows the last one."""
    body = b""
    while True:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        body, data = body + rest[:length], rest[length + 2 :]
        if length == 0:
            assert data == b""
            return body
