"""GET /watch/steps over a real socket: a snapshot, then what happens."""

import asyncio
import json
import socket

import aiohttp

from aioserve.engine.live_feed import shown_id
from tests.processes import PATIENCE
from tests.server.conformity import check_answer


async def frames_of(response):
    """The events, each checked against the OpenAPI document."""
    data = b""
    async for piece in response.content.iter_any():
        *events, data = (data + piece).split(b"\n\n")
        for event in events:
            check_answer("GET", "/watch/steps", 200, response.content_type, event + b"\n\n")
            yield json.loads(event.removeprefix(b"data: "))


async def test_it_tells_the_life_of_a_request(server):
    async with server.session.get(f"{server.url}/watch/steps") as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        frames = frames_of(response)
        snapshot = await anext(frames)
        assert snapshot["kind"] == "snapshot"
        assert snapshot["about"]["model"] == "embedded"
        asked = asyncio.create_task(
            server.complete("What news?", max_tokens=12, ignore_eos=True, request_id="mine")
        )
        ended, came, num_steps = [], [], 0
        async for frame in frames:
            came += [row[1] for row in frame["events"]["came"]]
            num_steps += len(frame["events"]["planned"])
            ended += frame["events"]["ended"]
            if ended:
                break
        assert came == [shown_id("mine")]
        assert num_steps == 12
        assert ended[0][2:] == ["length", 12]
        assert (await asked).status == 200


async def test_two_who_look_see_the_same(server):
    async with (
        server.session.get(f"{server.url}/watch/steps") as one,
        server.session.get(f"{server.url}/watch/steps") as other,
    ):
        pair = frames_of(one), frames_of(other)
        first = [await anext(frames) for frames in pair]
        assert [frame["kind"] for frame in first] == ["snapshot", "snapshot"]
        await server.complete(max_tokens=3, ignore_eos=True)
        seen = []
        for frames in pair:
            by_number = {}
            async for frame in frames:
                by_number[frame["number"]] = frame
                if frame["events"]["ended"]:
                    break
            seen.append(by_number)
        both = seen[0].keys() & seen[1].keys()
        assert both
        assert all(seen[0][number] == seen[1][number] for number in both)


async def test_head_does_not_wait_for_an_end(server):
    async with (
        asyncio.timeout(PATIENCE),
        server.session.head(f"{server.url}/watch/steps") as response,
    ):
        assert response.status == 200


async def test_one_that_sleeps_loses_frames_and_wakes_to_a_snapshot(server, monkeypatch):
    monkeypatch.setattr("aioserve.engine.live_feed.FRAME_SECONDS", 0.002)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of those accepted, too
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (server.host, server.port))
    reader, sleeper = await asyncio.open_connection(sock=sock, limit=1024)
    sleeper.write(b"GET /watch/steps HTTP/1.1\r\nHost: localhost\r\n\r\n")
    told = 0  # to one who is awake

    async def ask():
        while told < 2**19:
            names = [f"{i}{'x' * 1000}" for i in range(40)]  # of which frames are full
            await asyncio.gather(*(server.complete(max_tokens=9, user=name) for name in names))

    async with server.session.get(f"{server.url}/watch/steps") as response:
        asking = asyncio.create_task(ask())
        async for data in response.content.iter_any():
            told += len(data)
            if told >= 2**19:
                break
        await asking
    async with asyncio.timeout(PATIENCE):
        received = b""
        while received.count(b'"kind":"snapshot"') < 2:
            received += await reader.read(65536)
    assert len(received) < told * 0.8
    sleeper.close()


async def test_a_server_that_shuts_down_says_so_at_the_end_of_the_stream(server):
    async with server.session.get(f"{server.url}/watch/steps") as response:
        frames = frames_of(response)
        await anext(frames)
        await server.engine.shutdown()
        last = [frame async for frame in frames][-1]
        assert "shutting down" in last["error"]["message"]


async def test_a_reader_that_leaves_is_forgotten(server):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{server.url}/watch/steps") as response,
    ):
        await anext(frames_of(response))
    assert (await server.complete(max_tokens=2)).status == 200
