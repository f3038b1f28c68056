"""A client that goes away, at any moment, leaves nothing behind: told by /metrics.

Through raw sockets, because a client library may close later than its caller thinks; on asyncio
and on uvloop.
"""

import asyncio
import functools
import json
import operator
import socket

import pytest
from aiohttp import ClientConnectionResetError

from aioserve.server.generation import EventStream
from tests.processes import PATIENCE
from tests.server.raw_client import IDLE, POST_HEAD, RawClient, until, until_idle
from tests.slow import mostly_slow

ENDLESS = {"max_tokens": 3000, "ignore_eos": True}


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_leaving_a_stream_mid_decode_frees_its_blocks(server, path, reset):
    prompt = (
        {"prompt": "Hello"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "Hello"}]}
    )
    client = await RawClient.post(server, path, stream=True, **prompt, **ENDLESS)
    await client.read_events(5)
    assert (await server.gauges())["num_requests_running"] == 1
    await client.leave(reset=reset)
    await until_idle(server, num_aborted=1)
    assert (await server.complete(max_tokens=1)).status == 200


async def test_leaving_before_a_whole_response_frees_its_blocks(server):
    client = await RawClient.post(server, prompt="Hello", **ENDLESS)
    await until(server, lambda gauges: gauges["num_requests_running"] == 1)
    await client.leave()
    await until_idle(server, num_aborted=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_in_prefill_frees_the_blocks_so_far(start_server, stream):
    # 64 tokens per step, 50 ms each: this prompt needs 2 s before its first token.
    async with start_server(runner={"step_base_ms": 50}) as server:
        client = await RawClient.post(server, prompt=[7] * 2500, stream=stream, **ENDLESS)
        await until(server, lambda gauges: gauges["kv_cache_used_blocks"] > 0)
        await client.leave()
        await until_idle(server, num_aborted=1)
        metrics = (await server.get("/metrics")).body.decode()
        assert "aioserve_generation_tokens_total 0.0" in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue_frees_the_place(start_server, stream):
    async with start_server(scheduler={"max_num_seqs": 1}) as server:
        first = await RawClient.post(server, prompt="First", stream=True, **ENDLESS)
        await first.read_events(1)
        queued = await RawClient.post(server, prompt="Second", stream=stream, **ENDLESS)
        await until(server, lambda gauges: gauges["num_requests_waiting"] == 1)
        await queued.leave()
        gauges = await until(server, lambda gauges: gauges["num_requests_waiting"] == 0)
        assert gauges["num_requests_running"] == 1
        await first.leave()
        await until_idle(server, num_aborted=2)


async def test_leaving_ends_all_samples_of_all_prompts(server):
    prompts = [[5, i] for i in range(4)]
    client = await RawClient.post(server, prompt=prompts, n=3, stream=True, **ENDLESS)
    await client.read_events(20)
    await until(server, lambda gauges: gauges["num_requests_running"] == 12)
    await client.leave()
    await until_idle(server, num_aborted=12)


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_between_two_choices_is_no_news(server, n, monkeypatch, caplog):
    caplog.set_level("INFO")
    send = EventStream.send

    async def send_some(stream, events):
        if stream.started:  # what aiohttp says between the reset and its own news of it
            raise ClientConnectionResetError("Cannot write to closing transport")
        await send(stream, events)

    monkeypatch.setattr(EventStream, "send", send_some)
    monkeypatch.setattr(EventStream, "has_room", False)
    monkeypatch.setattr(EventStream, "text_writer", lambda *_: None)
    client = await RawClient.post(server, prompt="Hello", n=n, stream=True, **ENDLESS)
    async with asyncio.timeout(PATIENCE):
        await client.reader.read()
    await client.leave()
    await until_idle(server, num_aborted=n)
    assert "Traceback" not in caplog.text


async def test_leaving_in_the_middle_of_a_body_is_survived(server):
    _reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(POST_HEAD + b'Content-Length: 99\r\n\r\n{"prom')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await server.complete(max_tokens=1)).status == 200
    assert await server.gauges() == IDLE


async def test_many_clients_that_leave_at_once_leave_nothing(server):
    clients = await asyncio.gather(
        *(RawClient.post(server, prompt=[5, i], stream=True, **ENDLESS) for i in range(50))
    )
    await asyncio.gather(*(client.read_events(1 + i % 5) for i, client in enumerate(clients)))
    await asyncio.gather(*(client.leave(reset=i % 2 == 0) for i, client in enumerate(clients)))
    await until_idle(server, num_aborted=50)


@pytest.mark.parametrize("return_token_ids", mostly_slow([False, True], but=[True]))
async def test_a_reader_that_stops_reading_delays_nobody_and_loses_nothing(
    start_server, return_token_ids
):
    async with start_server(runner={"step_base_ms": 0}) as server:
        # with a larger buffer the kernel takes all that is sent, and the server never waits
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        fields = {"max_tokens": 2000, "ignore_eos": True, "return_token_ids": return_token_ids}
        slow = await RawClient.post(server, prompt="Slow", stream=True, **fields)
        slow.writer.transport.pause_reading()  # the kernel's buffers fill up, then the server's
        quick = await server.complete("Slow", stream=True, **fields)
        await until_idle(server, num_aborted=0)  # the slow reader's request has finished as well
        slow.writer.transport.resume_reading()
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += await slow.reader.read(2**20)
        lines = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
        slow_events, quick_events = [json.loads(line) for line in lines], quick.events()
        assert 1 < len(slow_events) < len(quick_events)  # it got fewer, longer ones
        for field in ("text", "token_ids") if return_token_ids else ("text",):
            slow_told, quick_told = (
                functools.reduce(operator.add, [event["choices"][0][field] for event in events])
                for events in (slow_events, quick_events)
            )
            assert slow_told == quick_told
        await slow.leave()
