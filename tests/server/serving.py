"""A real server on a real socket, and what a test asks it."""

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from socket import socket
from typing import Any, NamedTuple

import aiohttp

from aioserve.config import EngineConfig, RunnerConfig, SchedulerConfig
from aioserve.engine import AsyncEngine, EngineClient
from aioserve.fleet.workers.remote_engine import RemoteResponses
from aioserve.runner.interface import RunnerInterface
from aioserve.server.app import listening
from aioserve.server.middleware import HttpCounts
from aioserve.server.running import RunningResponses
from aioserve.server.sockets import bind
from tests.server.conformity import check_answer
from tests.workers.joined import connected

SIMULATED = EngineConfig(
    scheduler=SchedulerConfig(policy="chunked_prefill", options={"chunk_size": 64}),
    runner=RunnerConfig(
        runner="simulated", step_base_ms=1, step_prefill_token_us=1, step_decode_us=1
    ),
)


class Answer(NamedTuple):
    """A response that was read to its end."""

    status: int
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON of each event; asserts that the stream ends with `[DONE]`."""
        *events, done, end = self.body.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        assert all(event.startswith(b"data: {") for event in events)
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    def named_events(self) -> Iterator[tuple[str, Any]]:
        """By name, with their data; asserts how they are framed."""
        *events, end = self.body.decode().split("\n\n")
        assert end == ""
        for lines in events:
            name, _, data = lines.removeprefix("event: ").partition("\ndata: ")
            assert json.loads(data)["type"] == name
            yield name, json.loads(data)


class Server:
    """A running server and the engine behind it."""

    def __init__(
        self,
        engine: AsyncEngine,
        front: EngineClient,
        url: str,
        session: aiohttp.ClientSession,
        socket: socket,
    ) -> None:
        self.engine = engine
        self.front = front  # what handlers ask
        self.socket = socket  # what clients connect to
        self.url = url
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)
        self.session = session

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        """Asserts that the OpenAPI document tells of such an answer. `data` is JSON."""
        if "data" in options:
            given = options.get("headers") or {}
            options["headers"] = {"Content-Type": "application/json", **given}
        async with self.session.request(method, self.url + path, **options) as response:
            answer = Answer(response.status, response.headers, await response.read())
        if self.engine.config.server.enable_admin or not path.startswith("/admin/"):
            check_answer(method, path, answer.status, response.content_type, answer.body)
        return answer

    async def get(self, path: str) -> Answer:
        return await self.request("GET", path)

    async def complete(self, prompt: Any = "Hello", **fields: Any) -> Answer:
        body = {"prompt": prompt, **fields}
        return await self.request("POST", "/v1/completions", json=body)

    async def chat(self, content: Any = "Hello", **fields: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.request("POST", "/v1/chat/completions", json=body)

    async def gauges(self) -> dict[str, float]:
        """Running and waiting requests and used blocks, as /metrics tells them."""
        lines = (await self.get("/metrics")).body.decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {
            name: float(values[f"aioserve_{name}"])
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_used_blocks")
        }


@asynccontextmanager
async def in_front(
    engine: AsyncEngine, sockets: list[socket]
) -> AsyncIterator[tuple[str, EngineClient]]:
    """The server's URL, and what it asks: the engine, or, as `make test-dist` has it, a worker's
    half of one.
    """
    if not os.environ.get("AIOSERVE_TEST_WORKER"):
        async with listening(engine, sockets) as url:
            yield url, engine
        return
    async with connected(engine, 1) as (_, [remote], _):
        running = RunningResponses(remote)
        remote.abort_here = running.abort
        responses, counts = RemoteResponses(remote), HttpCounts()
        remote.tell_counted = counts.tell
        async with listening(remote, sockets, responses, running, remote.access, counts) as url:
            yield url, remote


@asynccontextmanager
async def running(
    config: EngineConfig = SIMULATED, runner: RunnerInterface | None = None
) -> AsyncIterator[Server]:
    sockets = bind("127.0.0.1", 0)
    async with (
        AsyncEngine(config, runner=runner) as engine,
        in_front(engine, sockets) as (url, front),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        yield Server(engine, front, url, session, sockets[0])
