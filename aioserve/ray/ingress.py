"""HTTP for any number of models on Ray Serve: the server's own routes in front of replicas.

Ray's proxies speak ASGI, our handlers aiohttp: between them lies a Unix socket of this process.
Knows no fields of any body but `model`.
"""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession, ClientTimeout, UnixConnector, web
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from aioserve.config import EngineConfig
from aioserve.ray.front import RayFront
from aioserve.server.app import build_app

# Of one hop only (RFC 9110, 7.6.1); and the length, which whoever writes the body knows.
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"}


class _Model:
    """The routes of one model, on a socket."""

    def __init__(self, front: RayFront, path: Path) -> None:
        self.front = front
        self.path = path
        self.runner = web.AppRunner(
            build_app(front),
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=1.0,
        )
        self.session: ClientSession | None = None

    async def start(self) -> None:
        await self.runner.setup()
        await web.UnixSite(self.runner, str(self.path)).start()
        self.session = ClientSession(
            connector=UnixConnector(path=str(self.path), limit=0),
            timeout=ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()
        await self.runner.cleanup()


class _Named(msgspec.Struct):
    """All that is read of a body here."""

    model: str = ""


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


_decoder = msgspec.json.Decoder(_Named)


class Ingress:
    """The deployment that Ray's proxies call."""

    async def __init__(self, *models: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        """Pairs, one after the other: the settings of a model's replicas, and their handle."""
        self._folder = tempfile.TemporaryDirectory(prefix="aioserve-")
        self._models: dict[str, _Model] = {}
        configs: tuple[EngineConfig, ...] = models[::2]
        handles: tuple[DeploymentHandle, ...] = models[1::2]
        for i, (config, handle) in enumerate(zip(configs, handles, strict=True)):
            front = RayFront(config, handle)
            await front.start()
            model = _Model(front, Path(self._folder.name) / f"{i}.sock")
            await model.start()
            for name in (config.model.served_name, *front.adapters.paths):
                self._models[name] = model

    async def __call__(self, request: Request) -> Response:
        """Pass it on, and its answer piece by piece. Cancelled, it closes the connection, which
        aborts what was asked.
        """
        body = await request.body()
        if request.method == "GET" and request.url.path == "/v1/models":
            return await self._list_models()
        model = self._find(body)
        assert model.session is not None
        path = request.url.path
        url = f"http://aioserve{path}" + (f"?{request.url.query}" if request.url.query else "")
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP]
        response = await model.session.request(
            request.method, url, data=body, headers=headers, allow_redirects=False
        )

        async def chunks() -> AsyncIterator[bytes]:
            async with response:
                async for chunk in response.content.iter_any():
                    yield chunk

        made = StreamingResponse(chunks(), status_code=response.status)
        made.raw_headers = [
            (key.lower(), value)
            for key, value in response.raw_headers
            if key.lower().decode() not in HOP_BY_HOP
        ]
        return made

    async def __del__(self) -> None:
        for model in set(self._models.values()):
            await model.close()
        self._folder.cleanup()

    async def _list_models(self) -> Response:
        """Of all of them, as each lists its own."""
        lists = []
        for model in dict.fromkeys(self._models.values()):
            assert model.session is not None
            async with model.session.get("http://aioserve/v1/models") as response:
                lists.append(msgspec.json.decode(await response.read(), type=_ModelList))
        cards = [card for one in lists for card in one.data]
        body = msgspec.json.encode({"object": "list", "data": cards})
        return Response(body, media_type="application/json")

    def _find(self, body: bytes) -> _Model:
        """The model that the body names; the first, which will refuse, if it names no other."""
        first = next(iter(self._models.values()))
        if len(self._models) == 1 or not body:
            return first
        try:
            return self._models.get(_decoder.decode(body).model, first)
        except msgspec.MsgspecError:
            return first
