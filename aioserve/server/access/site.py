"""Where an application listens: a bound socket, plain or encrypted, with an eye on who comes.

Knows aiohttp's runner; which sockets there are, `sockets` knows.
"""

import asyncio
import functools
import logging
import ssl
from socket import AF_UNIX, socket

from aiohttp import web

from aioserve.server.access.acceptor import Acceptor
from aioserve.server.access.connections import Connection, Connections, Handshake
from aioserve.server.sockets import url_of

logger = logging.getLogger(__name__)

BACKLOG = 1024  # connections that the system keeps while the loop is busy

HANDSHAKE_SECONDS = 10.0  # of TLS


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
        self._acceptor: Acceptor | None = None

    @property
    def name(self) -> str:
        """Its address."""
        return url_of(self._socket, is_encrypted=self._ssl_context is not None)

    async def start(self) -> None:
        """Take connections. Raises `OSError`."""
        await super().start()
        assert self._runner.server is not None
        if self._ssl_context is not None:  # asyncio's own server would not tell before a handshake
            self._acceptor = Acceptor(self._socket, self._shake_hands, self._backlog)
            return
        loop = asyncio.get_running_loop()
        begin = loop.create_unix_server if self._socket.family == AF_UNIX else loop.create_server
        self._server = await begin(
            functools.partial(Connection, self._connections, self._runner.server),
            sock=self._socket,
            backlog=self._backlog,
        )

    async def stop(self) -> None:
        """Stop taking connections; those that are open stay."""
        if self._acceptor is not None:
            await self._acceptor.close(0)
        await super().stop()

    async def _shake_hands(self, sock: socket) -> None:
        assert self._runner.server is not None
        handshake = Handshake(sock)
        if not self._connections.add(handshake):
            sock.close()
            return
        make = functools.partial(Connection, self._connections, self._runner.server, handshake)
        why = ""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make, sock, ssl=self._ssl_context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except ssl.SSLError as error:
            why = error.reason or str(error)
        except ConnectionAbortedError:
            why = f"it took more than {HANDSHAKE_SECONDS:g} s"
        except OSError:
            pass  # the client has gone
        finally:
            self._connections.discard(handshake)
        if why and not handshake.is_dropped:
            self._connections.count("tls_handshake")
            logger.info("a client refused: its TLS handshake has failed: %s", why)
