"""A client on a raw socket, which can leave at any moment, and what is left behind then."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable

import pytest

from aioserve import RequestStream
from tests.processes import PATIENCE

#: The beginning of a request whose body is JSON.
POST_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)

IDLE = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_used_blocks": 0}


class RawClient:
    """One HTTP request on a socket of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def post(cls, server, path="/v1/completions", **body) -> "RawClient":
        client = cls(*await asyncio.open_connection(server.host, server.port))
        data = json.dumps(body).encode()
        head = POST_HEAD.replace(b"/v1/completions", path.encode())
        client.writer.write(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        await client.writer.drain()
        return client

    async def read_events(self, count: int) -> bytes:
        received = b""
        while received.count(b"\ndata: {") < count:
            data = await self.reader.read(65536)
            assert data, received
            received += data
        return received

    async def leave(self, *, reset: bool = False) -> None:
        if reset:  # RST instead of FIN, as a killed process or a firewall sends it
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.close()
        await self.writer.wait_closed()


async def until(server, is_reached: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Poll the gauges until they satisfy the condition."""
    async with asyncio.timeout(PATIENCE):
        while not is_reached(gauges := await server.gauges()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    return gauges


async def fail_what_runs(server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if what the only reader gets had raised, when it has streamed for a while."""
    await until(server, lambda gauges: gauges["num_requests_running"] == 1)
    await asyncio.sleep(0.05)
    monkeypatch.setattr(RequestStream, "put_text", lambda stream, index, text: False)
    monkeypatch.setattr(
        RequestStream, "put", lambda stream, output: stream.fail(ValueError("secret"))
    )


async def until_idle(server, *, num_aborted: int) -> None:
    """Nothing is left, and this number of requests did not just run to their end."""
    await until(server, lambda gauges: gauges == IDLE)
    metrics = (await server.get("/metrics")).body.decode()
    aborted = f'aioserve_requests_finished_total{{reason="abort"}} {num_aborted}.0'
    assert aborted in metrics, metrics
