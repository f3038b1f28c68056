"""What answers on the server's address while the model is being loaded.

It says that the process lives, is not ready and takes no request yet. Knows no engine. Every answer
closes its connection: the next one is for the server itself.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from socket import socket

from aiohttp import web
from aiohttp.typedefs import Handler

from aioserve.engine.operations.command import Health
from aioserve.errors import EngineDeadError
from aioserve.server.access.connections import BACKLOG, Acceptor
from aioserve.server.access.origins import HOSTS, Hosts, check_caller
from aioserve.server.admin import TELLS
from aioserve.server.middleware import answer_errors, say_when_to_come_again
from aioserve.server.sockets import bind_beside, share

LOADING = Health("loading", "the model is being loaded")

HANDLER_SECONDS = 1.0  # for answers that are being sent when loading ends

POLL_SECONDS = 0.01  # between looks whether all have been


@contextlib.asynccontextmanager
async def answering_while_loading(
    sockets: Sequence[socket],
    *,
    shares_port: bool,
    tls: ssl.SSLContext | None = None,
    hosts: Hosts | None = None,
) -> AsyncIterator["Loading"]:
    """Listen on the addresses of bound `sockets` inside the block, which stay their owner's;
    encrypted with `tls`, under the names of `hosts`, or any.

    The server stops it, and listens before the block ends, on the sockets that are yielded: so
    every connection is answered, and none as if the model were still loading when another one has
    heard that it is there. These are `sockets` themselves; with `shares_port` they are others
    beside them.
    """
    runner = web.AppRunner(_make_app(hosts), access_log=None, shutdown_timeout=HANDLER_SECONDS)
    await runner.setup()
    assert runner.server is not None
    loop, server = asyncio.get_running_loop(), runner.server
    loading = Loading(
        [
            Acceptor(
                bind_beside(sock) if shares_port else share(sock),
                lambda connection: loop.connect_accepted_socket(server, connection, ssl=tls),
                BACKLOG,
            )
            for sock in sockets
        ],
        server,
    )
    try:
        yield loading
    finally:
        await loading.close()
        await runner.cleanup()


class Loading:
    """The application that answers while the model is loaded, on its way out."""

    def __init__(self, acceptors: Sequence[Acceptor], server: web.Server) -> None:
        self._acceptors, self._server = acceptors, server

    @property
    def sockets(self) -> list[socket]:
        """On which it listens, in the order of addresses."""
        return [acceptor.socket for acceptor in self._acceptors]

    def stop(self) -> None:
        """Take no connection any more: they wait for the server that listens on `sockets` next."""
        for acceptor in self._acceptors:
            acceptor.stop()

    async def close(self) -> None:
        """Clients that are connected have a second to ask, and to read that they come too early;
        with TLS, a second before that to say hello.
        """
        self.stop()
        for acceptor in self._acceptors:
            await acceptor.close(HANDLER_SECONDS)
        for _ in range(round(HANDLER_SECONDS / POLL_SECONDS)):
            if not self._server.connections:
                break
            await asyncio.sleep(POLL_SECONDS)


def _make_app(hosts: Hosts | None) -> web.Application:
    app = web.Application(middlewares=[_close_connections, answer_errors])
    app.on_response_prepare.append(say_when_to_come_again)
    if hosts is not None:
        app[HOSTS] = hosts
        app.middlewares.append(check_caller)
    for path in TELLS:
        app.router.add_get(path, _tell)
    app.router.add_route("*", "/{path:.*}", _refuse)
    return app


@web.middleware
async def _close_connections(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    response.force_close()
    return response


async def _tell(request: web.Request) -> web.Response:
    return TELLS[request.path](LOADING)


async def _refuse(request: web.Request) -> web.Response:
    raise EngineDeadError(f"{LOADING.reason}: GET /ready says when it serves")
