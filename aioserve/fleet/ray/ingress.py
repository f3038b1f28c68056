"""HTTP for any number of models on Ray Serve: the server's own routes in front of replicas.

Streams pass through Ray, whose messages cost as much as dozens of tokens, at a pace; or go past
its proxies, by a port of the ingress.
"""

import asyncio
import contextlib
import os
import socket
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import ClientResponse, ClientSession, ClientTimeout, UnixConnector, hdrs, web
from aiohttp.typedefs import Handler
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from aioserve.config import EngineConfig
from aioserve.fleet.ray.chooser import render
from aioserve.fleet.ray.front import RayFront
from aioserve.fleet.ray.serve_log import log_through_serve
from aioserve.fleet.ray.settings import ModelSettings
from aioserve.server.access.access import Access
from aioserve.server.access.accounts import Accounts
from aioserve.server.access.keys import Rights
from aioserve.server.app import build_app, exempt_from_garbage_collection, max_body_mib
from aioserve.server.running import ResponseStore

# Of one hop only (RFC 9110, 7.6.1).
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}
# Headers that the HTTP client writes when it forwards a request.
OUR_OWN = {"content-length"}

# Connections that the system keeps while the loop is busy: requests that have waited for an ingress
# come at once. It may be set to keep fewer (net.core.somaxconn).
BACKLOG = 4096


class _Model:
    """The routes of one model, on a socket."""

    def __init__(self, front: RayFront, path: Path, responses: ResponseStore) -> None:
        self.front = front
        self.max_bytes = max_body_mib(front) * 2**20
        self._path = path
        self._session: ClientSession | None = None
        app = build_app(front, responses, access=_anybody(front.config))
        self._direct = DirectPort(app)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=1.0,
        )

    async def start(self, settings: ModelSettings) -> None:
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._path), backlog=BACKLOG).start()
        if settings.direct_port is not None:
            assert self._runner.server is not None
            await self._direct.start(
                self._runner.server, settings.direct_host, settings.direct_port
            )
        self._session = ClientSession(
            connector=UnixConnector(path=str(self._path), limit=0),
            timeout=ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def ask(
        self, method: str, target: str, headers: Sequence[tuple[str, str]] = (), body: bytes = b""
    ) -> ClientResponse:
        """Return the response once its head has come; the caller reads the rest or closes it."""
        assert self._session is not None
        return await self._session.request(
            method, f"http://aioserve{target}", data=body, headers=headers, allow_redirects=False
        )

    async def leave(self) -> None:
        """Return when all requests that Ray does not know are answered, and none can come."""
        if self._session is not None:
            await self._session.close()
        await self._direct.leave()

    async def close(self) -> None:
        await self._runner.cleanup()
        await self.front.close()


def _anybody(config: EngineConfig) -> Access:
    """Keys are the business of what stands in front of Ray: `check` has refused them."""
    return Access(config.access, (), Accounts(lambda name: Rights()))


class _Given(NamedTuple):
    """The things that the ingress is given for one model."""

    config: EngineConfig
    settings: ModelSettings
    group_configs: Sequence[EngineConfig]
    handles: Sequence[DeploymentHandle]


def _by_model(parts: Sequence[Any]) -> Iterator[_Given]:
    while parts:
        config, settings, group_configs, *rest = parts
        count = len(group_configs)
        yield _Given(config, settings, group_configs, rest[:count])
        parts = rest[count:]


class _Named(msgspec.Struct):
    """All that is read of a body here."""

    model: str = ""


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


_decoder = msgspec.json.Decoder(_Named)


class Ingress:
    """The deployment that Ray's proxies call."""

    async def __init__(self, shares_load: bool, *models: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        """For each model, one after the other: the settings of its replicas, what the application
        says of it, a list with the settings of each group of them, and a handle for each group.
        With `shares_load` there are other ingresses.
        """
        log_through_serve()
        self._pace = Pace()
        self._folder = tempfile.TemporaryDirectory(prefix="aioserve-")
        self._named: dict[str, _Model] = {}
        self._models: list[_Model] = []
        responses = ResponseStore()
        own = zlib.crc32(serve.get_replica_context().replica_id.unique_id.encode())
        for i, given in enumerate(_by_model(models)):
            front = RayFront(
                *(given.config, given.handles, given.settings),
                seed=given.config.runner.seed + (own << 32) + i,
                group_configs=given.group_configs,
                shares_load=shares_load,
            )
            await front.start()
            model = _Model(front, Path(self._folder.name) / f"{i}.sock", responses)
            await model.start(given.settings)
            self._models.append(model)
            for name in (*given.config.model.served_names, *front.adapters.paths):
                self._named[name] = model
        exempt_from_garbage_collection()

    async def __call__(self, request: Request) -> Response:
        """Pass it on, and its answer piece by piece. Cancelled, it closes the connection, which
        aborts what was asked.
        """
        if request.method == "GET" and request.url.path == "/v1/models":
            return await self._list_models()
        if request.method == "GET" and request.url.path == "/metrics" and len(self._models) > 1:
            told = render([model.front.router_metrics for model in self._models])
            return Response(told, media_type="text/plain; version=0.0.4")
        response = await self._ask(request, await self._read(request))

        async def chunks() -> AsyncIterator[bytes]:
            async with response:
                async for piece in self._pace.pieces(response):
                    yield piece

        made = StreamingResponse(chunks(), status_code=response.status)
        made.raw_headers = [
            (key.lower(), value)
            for key, value in response.raw_headers
            if key.lower().decode() not in HOP_BY_HOP
        ]
        return made

    async def __del__(self) -> None:
        """Ray waits for requests of its proxies before, and ends the process when it has waited as
        long as `graceful_shutdown_timeout_s` says.
        """
        await asyncio.gather(*(model.leave() for model in self._models))
        for model in self._models:
            await model.close()
        self._folder.cleanup()

    async def _read(self, request: Request) -> bytes:
        """Return the body; of one that is too long as much as it takes to refuse it."""
        most = max(model.max_bytes for model in self._models)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                break
        return bytes(body)

    async def _ask(self, request: Request, body: bytes) -> ClientResponse:
        """Return the model that the body names. If it names none, one after the other: until one
        knows what is asked for, or, if that is how it is, one is not well.
        """
        path, query = request.url.path, request.url.query
        target = f"{path}?{query}" if query else path
        headers = [
            (key, value)
            for key, value in request.headers.items()
            if key.lower() not in HOP_BY_HOP | OUR_OWN
        ]
        models = self._find(body)
        for model in models:
            response = await model.ask(request.method, target, headers, body)
            is_last = model is models[-1]
            is_told = response.status != (200 if path in ("/livez", "/health", "/ready") else 404)
            if is_last or is_told:
                return response
            response.close()
        raise AssertionError("there is no model")

    def _find(self, body: bytes) -> list[_Model]:
        """Return the models that may serve a request with this body."""
        if len(self._models) > 1 and body:
            with contextlib.suppress(msgspec.MsgspecError):
                if name := _decoder.decode(body).model:
                    # The first refuses names that no model has.
                    return [self._named.get(name, self._models[0])]
        return self._models

    async def _list_models(self) -> Response:
        """Return the list of all models: each application lists its own."""
        cards: list[msgspec.Raw] = []
        for model in self._models:
            async with await model.ask("GET", "/v1/models") as response:
                cards += msgspec.json.decode(await response.read(), type=_ModelList).data
        body = msgspec.json.encode({"object": "list", "data": cards})
        return Response(body, media_type="application/json")


# How often a stream is passed on through Ray, whose messages cost as much as dozens of tokens. A
# lone stream goes on piece by piece. The more there are, the longer each gathers what comes, so
# that all of them together stay below a share of one core.


# Seconds between two pieces of a stream for each stream beside it, and at most. A message costs the
# ingress and the proxy half a millisecond together; these are half of one core for both. Guesses.
SECONDS_PER_STREAM = 1e-3
MAX_SECONDS = 0.05


class Pace:
    """The pace of all streams of one ingress."""

    def __init__(self) -> None:
        self._num_streams = 0

    async def pieces(self, response: ClientResponse) -> AsyncIterator[bytes]:
        """Yield the body of `response` in pieces; the first one and the end at once."""
        content = response.content
        with self._counted():
            async for piece in content.iter_any():
                yield piece
                seconds = self.seconds
                if seconds and not content.at_eof():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(content.wait_eof(), seconds)

    @property
    def seconds(self) -> float:
        """Between two pieces of a stream, with as many streams as there are now."""
        return min((self._num_streams - 1) * SECONDS_PER_STREAM, MAX_SECONDS)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1


# The port on which an ingress serves HTTP without Ray's proxies, and how it is left. Ray waits for
# requests that its proxies have sent; those of this port are waited for here. Other ingresses of
# the node may share the port. Knows sockets and aiohttp; knows no model.


_PORT_BACKLOG = 1024  # connections that the system keeps while the loop is busy

# Seconds in which a connection that a client has kept may bring another request, once the ingress
# goes: its answer closes the connection. Then it is closed without one. A guess.
KEPT_SECONDS = 5.0
LOOK_SECONDS = 0.05  # between two looks whether requests are left


class DirectPort:
    """A direct port of one application, made before that is set up."""

    def __init__(self, app: web.Application) -> None:
        self._num_requests = 0
        self._is_leaving = False
        self._server: web.Server
        self._listening: asyncio.Server | None = None

        @web.middleware
        async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._num_requests += 1
            try:
                return await handler(request)
            finally:
                self._num_requests -= 1

        app.middlewares.insert(0, counted)
        app.on_response_prepare.append(self._close_behind)

    async def start(self, server: web.Server, host: str, port: int) -> None:
        """Listen, beside other ingresses of this node. Raises `OSError`."""
        self._server = server
        self._listening = await asyncio.get_running_loop().create_server(
            server, host, port, reuse_port=True, backlog=_PORT_BACKLOG
        )

    async def leave(self) -> None:
        """Take no more connections; return when all that came by those that there are is
        answered.
        """
        if self._listening is None:
            return
        self._is_leaving = True
        loop = asyncio.get_running_loop()
        for accepted in _close(self._listening):
            await loop.connect_accepted_socket(self._server, accepted)
        over = loop.time() + KEPT_SECONDS
        while self._num_requests or (  # noqa: ASYNC110
            self._server.connections and loop.time() < over
        ):
            await asyncio.sleep(LOOK_SECONDS)

    async def _close_behind(self, _: web.Request, response: web.StreamResponse) -> None:
        """Signal handler, before headers leave: the client asks another ingress next time."""
        if self._is_leaving:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"


def _close(listening: asyncio.Server) -> list[socket.socket]:
    """Close a server; what the system has accepted for it until then, which it would reset."""
    doors = [socket.socket(fileno=os.dup(sock.fileno())) for sock in listening.sockets]
    listening.close()  # the duplicates go on listening
    accepted: list[socket.socket] = []
    for door in doors:
        with door, contextlib.suppress(OSError):  # none is left
            while True:
                with contextlib.suppress(ConnectionError):  # that one has left
                    accepted.append(door.accept()[0])
    for sock in accepted:
        sock.setblocking(False)
    return accepted
