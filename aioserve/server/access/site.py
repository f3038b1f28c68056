"""Where an application listens: a bound socket, plain or encrypted, with an eye on who comes.

Knows aiohttp's runner; which sockets there are, `sockets` knows.
"""

import asyncio
import functools
import ssl
from socket import AF_UNIX, socket

from aiohttp import web

from aioserve.server.access.connections import Connection, Connections
from aioserve.server.sockets import url_of

BACKLOG = 1024  # connections that the system keeps while the loop is busy

HANDSHAKE_SECONDS = 10.0  # of TLS, before a connection counts


class Site(web.BaseSite):
    """On a socket that stays its owner's."""

    def __init__(
        self,
        runner: web.BaseRunner,
        sock: socket,
        connections: Connections,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._socket = sock
        self._connections = connections

    @property
    def name(self) -> str:
        """Its address."""
        return url_of(self._socket, is_encrypted=self._ssl_context is not None)

    async def start(self) -> None:
        """Take connections. Raises `OSError`."""
        await super().start()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        begin = loop.create_unix_server if self._socket.family == AF_UNIX else loop.create_server
        self._server = await begin(
            functools.partial(Connection, self._connections, self._runner.server),
            sock=self._socket,
            backlog=self._backlog,
            ssl=self._ssl_context,
            ssl_handshake_timeout=None if self._ssl_context is None else HANDSHAKE_SECONDS,
        )
