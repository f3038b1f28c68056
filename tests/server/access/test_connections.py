"""Clients that are slow, silent, greedy or many: each gets its due, and others are served."""

import asyncio
import contextlib
import io
import json
import socket
from collections import Counter

import pytest
from aiohttp import web

from aioserve.config import AccessConfig
from aioserve.server.access import connections
from tests.processes import PATIENCE
from tests.server.raw_client import IDLE, POST_HEAD, RawClient, until


@pytest.fixture(autouse=True)
def frequent_sweeps(monkeypatch):
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.02)
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.2)


class Raw:
    """A connection of which every byte is the test's."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, server):
        raw = cls(*await asyncio.open_connection(server.host, server.port))
        try:
            yield raw
        finally:
            raw.writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):  # it has been answered already
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict]:
        """What comes until the server closes the connection: status and JSON."""
        async with asyncio.timeout(PATIENCE):
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := await self.reader.read(65536):
                    received += data
        head, _, body = received.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    async def closed(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.reader.read()


async def refusals(server) -> dict[str, float]:
    lines = (await server.get("/metrics")).body.decode().splitlines()
    named = [line for line in lines if line.startswith("aioserve_requests_refused_total{")]
    return {line.split('"')[3]: float(line.rpartition(" ")[2]) for line in named}


async def test_a_head_that_does_not_end_is_a_408_and_others_are_served_meanwhile(start_server):
    async with start_server(access={"header_timeout": 0.2}) as server, Raw.to(server) as slow:
        await slow.send(POST_HEAD + b"X-")
        assert (await server.complete(max_tokens=1)).status == 200
        status, body = await slow.answer()
        assert (status, body["error"]["code"]) == (408, "slow_head")
        assert "took more than 0.2 s" in body["error"]["message"]
        assert (await refusals(server))["slow_head"] == 1


async def test_a_head_that_is_as_long_in_coming_as_it_may_be_is_served(start_server):
    async with start_server(access={"header_timeout": PATIENCE}) as server, Raw.to(server) as slow:
        for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n":
            await slow.send(bytes([byte]))
        assert await slow.answer() == (200, {"status": "ok"})


async def test_an_empty_line_behind_a_request_is_not_taken_for_the_next_one(start_server):
    settings = {"header_timeout": 0.05, "keep_alive_timeout": 0.5}
    async with start_server(access=settings) as server, Raw.to(server) as client:
        await client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await client.reader.readuntil(b"}")
        await client.send(b"\r\n")
        assert await client.closed() == b""  # for it was idle


async def test_a_body_that_does_not_come_is_a_408(start_server):
    async with start_server(access={"body_timeout": 0.2}) as server, Raw.to(server) as slow:
        head = POST_HEAD + b"Content-Length: 99\r\n"
        await slow.send(head + b"Connection: close\r\n\r\n{")
        async with asyncio.timeout(PATIENCE):
            answer = await slow.reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in answer
        assert (await refusals(server))["body_timeout"] == 1


#: By what is too long.
HEADS = {
    "a line": b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"a" * 2**20 + b"\r\n\r\n",
    "a path": b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\n\r\n",
    "many": b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(90_000)) + b"\r\n",
    "many long ones": b"GET / HTTP/1.1\r\n"
    + b"".join(b"X-%d: %b\r\n" % (i, b"a" * 9000) for i in range(115)),
    "a little too long": b"GET / HTTP/1.1\r\n"
    + b"".join(b"X-%d: %b\r\n" % (i, b"a" * 900) for i in range(80)),
}


async def test_headers_that_are_too_long_are_a_431(server):
    async def send(head):
        async with Raw.to(server) as greedy:
            await greedy.send(head)
            return await greedy.answer()

    for what, (status, body) in zip(
        HEADS, await asyncio.gather(*map(send, HEADS.values())), strict=True
    ):
        assert (status, body["error"]["code"]) == (431, "head_too_large"), what
        assert "more than 65536 bytes together" in body["error"]["message"]
    assert (await server.get("/health")).status == 200


async def test_headers_of_less_than_the_limit_are_taken(server):
    async with Raw.to(server) as long:
        fields = b"".join(b"X-%d: %b\r\n" % (i, b"a" * 900) for i in range(70))
        await long.send(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + fields + b"\r\n"
        )
        assert (await long.answer())[0] == 200


async def test_what_is_no_http_has_an_id_that_finds_its_line(server, caplog):
    caplog.set_level("INFO")
    async with Raw.to(server) as client:
        await client.send(b"nonsense\r\n\r\n")
        head = (await client.closed()).decode().partition("\r\n\r\n")[0]
    [request_id] = [line[14:] for line in head.splitlines() if line.startswith("X-Request-Id: ")]
    [line] = [line for line in caplog.messages if request_id in line]
    assert "refused: this is not HTTP/1.1" in line


REFUSED = [
    (b"nonsense\r\n\r\n", (400, "bad_http")),
    (b"GET / HTTP/9\r\n\r\n", (400, "bad_http")),
    (b"\x16\x03\x01\x02\x00\x01", (400, "bad_http")),  # the beginning of a handshake
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400, "bad_http")),
    (b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 70_000, (431, "head_too_large")),
    (b"GET / HTTP/1.1\r\n" + b"X-A: aaaa\r\n" * 6000 + b"\r\n", (431, "head_too_large")),
]


@pytest.mark.parametrize("is_there", [False, True])
async def test_what_is_no_http_or_too_long_is_refused_in_words_and_counted(
    server, is_there, caplog
):
    """Sent after the server has accepted the connection, or before."""
    caplog.set_level("INFO")

    async def send(data):
        sock = socket.create_connection((server.host, server.port))
        if is_there:
            sock.sendall(data)  # the server is this thread: it accepts afterwards
        raw = Raw(*await asyncio.open_connection(sock=sock))
        if not is_there:
            await server.get("/health")  # it has accepted
            await raw.send(data)
        status, body = await raw.answer()
        raw.writer.close()
        return status, body["error"]["code"]

    answers = await asyncio.gather(*(send(data) for data, _ in REFUSED))
    assert answers == [expected for _, expected in REFUSED]
    counts = await refusals(server)
    assert (counts["bad_http"], counts["head_too_large"]) == (4, 2)
    assert "Traceback" not in caplog.text


async def test_what_is_no_http_behind_a_request_is_a_400_and_counted(server, caplog):
    caplog.set_level("INFO")
    client = await RawClient.post(server, prompt="Hello", stream=True, max_tokens=100)
    received = await client.read_events(1)  # it is being answered
    client.writer.write(b"nonsense\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        received += await client.reader.read()
    await client.leave()
    stream, answer = received.split(b"HTTP/1.", 2)[1:]
    assert b"[DONE]" in stream
    assert answer[1:].startswith(b" 400 ")
    assert b'"code":"bad_http"' in answer
    assert (await refusals(server))["bad_http"] == 1
    assert "Traceback" not in caplog.text


async def test_a_body_that_says_that_it_is_too_long_is_refused_before_it_comes(server):
    async with Raw.to(server) as greedy:
        head = POST_HEAD + b"Content-Length: %d\r\n\r\n" % 2**26
        await greedy.send(head)
        async with asyncio.timeout(PATIENCE):
            answer = await greedy.reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_bodies_that_are_coming_are_bounded_together_and_short_ones_pass(start_server):
    limits = {"access": {"max_bodies_mib": 1}, "server": {"max_body_mib": 1}}
    body = b'{"prompt": "Hello", "max_tokens": 1}'
    long = body + b" " * 500_000
    async with start_server(**limits) as server, Raw.to(server) as slow:
        length = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % (len(body) + 900_000)
        await slow.send(POST_HEAD + length + body + b" " * 800_000)
        async with asyncio.timeout(PATIENCE):
            while True:  # until all of that has come
                answer = await server.request("POST", "/v1/completions", data=long)
                if answer.status != 200:
                    break
        assert (answer.status, answer.json()["error"]["code"]) == (503, "too_many_bodies")
        assert int(answer.headers["Retry-After"]) > 0
        assert (await server.request("POST", "/v1/completions", data=body)).status == 200
        assert (await refusals(server))["too_many_bodies"] >= 1
        await slow.send(b" " * 100_000)
        assert (await slow.answer())[0] == 200
        assert (await server.request("POST", "/v1/completions", data=long)).status == 200


async def test_64_mib_of_body_are_a_413_that_the_client_can_read(server):
    answer = await server.request("POST", "/v1/completions", data=io.BytesIO(bytes(2**26)))
    assert answer.status == 413
    assert set((await server.gauges()).values()) == {0}


async def test_an_idle_connection_is_closed_after_its_time(start_server):
    async with start_server(access={"keep_alive_timeout": 0.1}) as server, Raw.to(server) as idle:
        assert await idle.closed() == b""  # it never asked
        async with Raw.to(server) as used:
            await used.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await used.closed()).endswith(b'{"status":"ok"}')


async def test_of_too_many_connections_the_one_that_is_idle_longest_makes_room(start_server):
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(start_server(access={"max_connections": 3}))
        idle = [await stack.enter_async_context(Raw.to(server)) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await server.complete(max_tokens=1)).status == 200  # by a fourth
        assert await idle[0].closed() == b""
        await idle[2].send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await idle[2].answer())[0] == 200


async def test_who_sends_a_body_slowly_makes_room_and_who_waits_for_an_answer_does_not(
    start_server,
):
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(start_server(access={"max_connections": 3}))
        fields = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}
        busy = await RawClient.post(server, **fields)
        await busy_one(server)
        for _ in range(2):
            slow = await stack.enter_async_context(Raw.to(server))
            await slow.send(POST_HEAD + b"Content-Length: 9\r\n\r\n{")
        await refusals(server)
        assert (await server.complete(max_tokens=1)).status == 200
        assert (await refusals(server))["idle_connection_closed"] >= 1
        await busy_one(server)
        await busy.leave()


async def busy_one(server) -> None:
    await until(server, lambda gauges: gauges["num_requests_running"] == 1)


async def test_many_that_come_at_once_are_no_more_than_there_may_be(start_server):
    async with start_server(access={"max_connections": 3}) as server:
        many = [socket.create_connection((server.host, server.port)) for _ in range(20)]
        async with asyncio.timeout(PATIENCE):
            while (await refusals(server)).get("idle_connection_closed", 0) < 18:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await server.complete(max_tokens=1)).status == 200
        for sock in many:
            sock.close()


async def test_where_all_are_busy_one_more_hears_so_and_they_go_on(start_server):
    async with start_server(access={"max_connections": 2}) as server:
        fields = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        busy = [await RawClient.post(server, **fields) for _ in range(2)]
        for client in busy:
            await client.read_events(1)
        async with Raw.to(server) as late:
            status, body = await late.answer()
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        for client in busy:
            await client.read_events(1)
            await client.leave()


LONG = json.dumps({"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}).encode()
POST = POST_HEAD + b"Content-Length: %d\r\n\r\n"


async def test_who_waits_for_an_answer_is_busy_however_many_requests_came_in_one_write(
    start_server,
):
    async with start_server(access={"max_connections": 1}) as server, Raw.to(server) as client:
        await client.send(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + POST % len(LONG) + LONG
        )
        async with asyncio.timeout(PATIENCE):
            assert b"200 OK" in await client.reader.readuntil(b"}")
        for send in (b"", POST % 9 + b"{"):  # the body of the next one may take its time
            await client.send(send)
            await asyncio.sleep(0.02)
            async with Raw.to(server) as late:
                assert (await late.answer())[1]["error"]["code"] == "too_many_connections"
        assert server.engine.get_stats().num_running_reqs == 1


async def test_2000_idle_connections_keep_nobody_from_being_served(start_server):
    async with start_server(access={"max_connections": 2100}) as server:
        writers = []
        try:
            for _ in range(2000):
                _, writer = await asyncio.open_connection(server.host, server.port)
                writers.append(writer)
            assert (await server.complete(max_tokens=3)).status == 200
        finally:
            for writer in writers:
                writer.close()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Hello", "logprobs": 20}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "?"}], "logprobs": True, "top_logprobs": 20},
        ),
    ],
)
async def test_a_client_that_never_reads_is_dropped_and_its_request_ends(
    start_server, path, fields
):
    # So much that no buffer of the system's holds it.
    fields |= {"max_tokens": 4000, "ignore_eos": True, "n": 128, "return_token_ids": True}
    async with start_server(access={"send_timeout": 0.2}) as server:
        client = await RawClient.post(server, path, stream=True, **fields)
        client.writer.transport.pause_reading()
        async with asyncio.timeout(PATIENCE):
            while "unread_answer" not in await refusals(server):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await until(server, lambda gauges: gauges == IDLE)
        await client.leave(reset=True)


@pytest.mark.slow  # quick: the buffer below
async def test_a_client_that_reads_slowly_and_steadily_is_not_dropped(start_server):
    fields = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "n": 64, "stream": True}
    async with start_server(access={"send_timeout": 3.0}) as server:
        client = await RawClient.post(server, return_token_ids=True, logprobs=20, **fields)
        received, loop = 0, asyncio.get_running_loop()
        began = loop.time()
        while loop.time() - began < 4:
            data = await client.reader.read(65536)
            assert data
            received += len(data)
            await asyncio.sleep(0.02)
        assert "unread_answer" not in await refusals(server)
        assert received > 2**18
        await client.leave(reset=True)
        await until(server, lambda gauges: gauges == IDLE)


class Buffer:
    """What has been sent and not read, as a test says."""

    size, is_aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_buffer_that_is_read_and_filled_again_is_not_one_that_nobody_reads():
    settings = AccessConfig(send_timeout=10)
    all_connections = connections.Connections(settings, 1, Counter())
    connection = connections.Connection(all_connections, web.Server(lambda request: None))
    connection._link = buffer = Buffer()
    for now, buffer.size in ((0, 50), (5, 60), (9, 55), (15, 70), (18, 65), (27, 80), (28, 90)):
        connection.check(now)
        assert not buffer.is_aborted, now
    buffer.size = 95
    connection.check(28.5)  # nothing was read since 18
    assert buffer.is_aborted
    all_connections.close()


async def test_a_half_closed_socket_is_a_client_that_has_left(server):
    fields = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}
    client = await RawClient.post(server, **fields)
    await until(server, lambda gauges: gauges["num_requests_running"] == 1)
    client.writer.write_eof()
    await until(server, lambda gauges: gauges == IDLE)
    assert await client.reader.read() == b""
    await client.leave()


async def test_a_refused_client_that_goes_on_sending_is_closed_and_nothing_stays(start_server):
    async with start_server(access={"max_connections": 1}) as server, Raw.to(server) as greedy:
        await greedy.send(b"nonsense\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    greedy.writer.write(b"a" * 65536)
                    await greedy.writer.drain()
        assert (await server.get("/health")).status == 200  # by the only one that there may be


async def test_the_system_asks_clients_that_are_silent(server, monkeypatch):
    links = []
    made = connections.Connection.connection_made

    def noted(connection: connections.Connection, link: asyncio.Transport) -> None:
        links.append(link)
        made(connection, link)

    monkeypatch.setattr(connections.Connection, "connection_made", noted)
    assert (await server.get("/health")).status == 200
    [link] = links
    assert link.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
