"""The port on which an ingress serves HTTP without Ray's proxies, and how it is left.

Ray waits for requests that its proxies have sent; those of this port are waited for here. Other
ingresses of the node may share the port. Knows sockets and aiohttp; knows no model.
"""

import asyncio
import contextlib
import os
import socket

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

BACKLOG = 1024  # connections that the system keeps while the loop is busy

# Seconds in which a connection that a client has kept may bring another request, once the ingress
# goes: its answer closes the connection. Then it is closed without one. A guess.
KEPT_SECONDS = 5.0
LOOK_SECONDS = 0.05  # between two looks whether requests are left


class DirectPort:
    """Of one application, made before that is set up."""

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
            server, host, port, reuse_port=True, backlog=BACKLOG
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
