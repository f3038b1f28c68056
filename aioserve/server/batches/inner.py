"""Requests of the server's own: the handlers of the API, asked without a connection.

A line of a batch goes the way of a request over HTTP: the same decoding, checks, limits and words
of refusal. It has no client that could leave; what runs it may be cancelled, which aborts it.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import StreamReader, hdrs, web
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.typedefs import Handler
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from aioserve.errors import RequestError
from aioserve.server import completions, embeddings
from aioserve.server.access.keys import Key
from aioserve.server.chat import routes as chat
from aioserve.server.keys import KEY, OWN_HINTS, RESPONSE_ID
from aioserve.server.middleware import answer_errors
from aioserve.server.responses import routes as responses
from aioserve.server.running import make_id

#: By route, what lines of batches can ask for.
HANDLERS: Mapping[str, Handler] = {
    "/v1/chat/completions": chat.create_chat_completion,
    "/v1/completions": completions.create_completion,
    "/v1/embeddings": embeddings.create_embedding,
    "/v1/responses": responses.create_response,
}


class _Asked(msgspec.Struct):
    stream: Any = None


_asked = msgspec.json.Decoder(_Asked)
_HEADERS = CIMultiDictProxy(CIMultiDict({hdrs.CONTENT_TYPE: "application/json"}))


class InnerRequest(web.Request):
    """A request whose body is here, and which belongs to an application without its router."""

    ATTRS = web.Request.ATTRS | {"_own_app"}

    def __init__(
        self,
        app: web.Application,
        path: str,
        body: bytes,
        protocol: web.RequestHandler,
        *,
        name: str,
        max_bytes: int,
    ) -> None:
        """`name` stands in the log where a client's address would."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        payload = StreamReader(protocol, len(body) + 1, loop=loop)
        payload.feed_data(body)
        payload.feed_eof()
        version, url = HttpVersion11, URL(path)
        message = RawRequestMessage(
            "POST", path, version, _HEADERS, (), True, None, False, False, url
        )
        super().__init__(
            *(message, payload, protocol, StreamWriter(protocol, loop), task, loop),
            client_max_size=max_bytes,
            remote=name,
        )
        self._own_app = app

    @property
    def app(self) -> web.Application:
        return self._own_app


class Inner:
    """Asks the handlers of an application."""

    def __init__(self, app: web.Application, max_bytes: int) -> None:
        """`max_bytes` is the limit of a body, as over HTTP."""
        self.max_bytes = max_bytes
        self._app = app
        self._protocol = web.RequestHandler(  # never connected
            web.Server(self._refuse), loop=asyncio.get_running_loop()
        )

    async def ask(
        self, path: str, body: bytes, key: Key | None, hints: Mapping[str, bool], name: str
    ) -> tuple[str, web.Response]:
        """An id, as in the log, and the answer or the refusal that a client with that key would
        get. `hints` go before those of the body. Cancelled, it aborts what was asked for.
        """
        request = InnerRequest(
            self._app, path, body, self._protocol, name=name, max_bytes=self.max_bytes
        )
        request[OWN_HINTS] = dict(hints)
        if key is not None:
            request[KEY] = key
        handler = _refuse_stream if _asked.decode(body).stream is True else HANDLERS[path]
        response = await answer_errors(request, handler)
        assert isinstance(response, web.Response)
        return request.get(RESPONSE_ID) or make_id(), response

    async def _refuse(self, request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("it has no connection")


async def _refuse_stream(request: web.Request) -> web.StreamResponse:
    """The handler of a line that asks for a stream."""
    raise RequestError(
        "stream must not be true in a line of a batch: its answer in a file is whole",
        param="stream",
    )
