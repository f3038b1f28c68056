"""What answers on the server's address while the model is being loaded: that it lives, is not
ready, and takes no request yet.

Knows no engine. Every answer closes its connection: the next one is for the server itself.
"""

import asyncio
import contextlib
import errno
import ssl
from collections.abc import AsyncIterator, Sequence
from socket import socket
from typing import Any

from aiohttp import web

from aioserve.engine.questions import Health
from aioserve.errors import EngineDeadError
from aioserve.server.access.hosts import Hosts
from aioserve.server.access.origins import check_caller
from aioserve.server.access.site import BACKLOG
from aioserve.server.admin import tell_alive, tell_ready
from aioserve.server.keys import HOSTS
from aioserve.server.middleware import Handler, answer_errors, say_when_to_come_again
from aioserve.server.sockets import bind_beside, share

LOADING = Health("loading", "the model is being loaded")

HANDLER_SECONDS = 1.0  # for whoever is being answered at the end

POLL_SECONDS = 0.01  # between looks whether all have been

FULL_SECONDS = 1.0  # until somebody is let in again, after there were too many


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
    server = runner.server
    loading = Loading(
        [_Door(sock, server, tls, shares_port=shares_port) for sock in sockets], server
    )
    try:
        yield loading
    finally:
        await loading.close()
        await runner.cleanup()


class Loading:
    """What answers meanwhile, on its way out."""

    def __init__(self, doors: "Sequence[_Door]", server: web.Server) -> None:
        self._doors, self._server = doors, server

    @property
    def sockets(self) -> list[socket]:
        """On which it listens, in the order of addresses."""
        return [door.socket for door in self._doors]

    def stop(self) -> None:
        """Take no connection any more: they wait for the server that listens on `sockets` next."""
        for door in self._doors:
            door.stop()

    async def close(self) -> None:
        """Clients that are connected have a second to ask, and to read that they come too early."""
        self.stop()
        for door in self._doors:
            await door.close()
        for _ in range(round(HANDLER_SECONDS / POLL_SECONDS)):
            if not self._server.connections:
                break
            await asyncio.sleep(POLL_SECONDS)


class _Door:
    """Takes connections until it is stopped. Not asyncio's own server: in Python 3.11 that forgets
    a connection which it accepts in the turn in which it is closed, and the client waits for ever.
    """

    def __init__(
        self, sock: socket, server: web.Server, tls: ssl.SSLContext | None, *, shares_port: bool
    ) -> None:
        self._tls = tls
        self.socket = bind_beside(sock) if shares_port else share(sock)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[Any]] = set()
        self._is_stopped = False
        self.socket.setblocking(False)
        self.socket.listen(BACKLOG)
        self._listen()

    def stop(self) -> None:
        """Leave those that come to the queue. Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            self._loop.remove_reader(self.socket.fileno())

    def _listen(self) -> None:
        if not self._is_stopped:
            self._loop.add_reader(self.socket.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError as error:  # nobody is left, or has gone again
                if error.errno in (errno.EMFILE, errno.ENFILE):  # no descriptors: let some close
                    self._loop.remove_reader(self.socket.fileno())
                    self._loop.call_later(FULL_SECONDS, self._listen)
                return
            connection.setblocking(False)
            enters = self._loop.connect_accepted_socket(self._server, connection, ssl=self._tls)
            task = self._loop.create_task(enters)
            self._entering.add(task)
            task.add_done_callback(self._entered)

    def _entered(self, task: asyncio.Task[Any]) -> None:
        self._entering.discard(task)
        if not task.cancelled():
            task.exception()  # a handshake that failed is nobody's news

    async def close(self) -> None:
        """Whoever has entered is answered; who takes his time to, with TLS, is not waited for."""
        self.stop()
        self.socket.close()
        if self._entering:
            _, late = await asyncio.wait(self._entering, timeout=HANDLER_SECONDS)
            for task in late:
                task.cancel()


def _make_app(hosts: Hosts | None) -> web.Application:
    app = web.Application(middlewares=[_close_connections, answer_errors])
    app.on_response_prepare.append(say_when_to_come_again)
    if hosts is not None:
        app[HOSTS] = hosts
        app.middlewares.append(check_caller)
    app.router.add_get("/health", _tell_alive)
    app.router.add_get("/ready", _tell_ready)
    app.router.add_route("*", "/{path:.*}", _refuse)
    return app


@web.middleware
async def _close_connections(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    response.force_close()
    return response


async def _tell_alive(request: web.Request) -> web.Response:
    return tell_alive(LOADING)


async def _tell_ready(request: web.Request) -> web.Response:
    return tell_ready(LOADING)


async def _refuse(request: web.Request) -> web.Response:
    raise EngineDeadError(f"{LOADING.reason}: GET /ready says when it serves")
