"""Where an application listens: a bound socket, plain or encrypted, with a limit on connections.

Knows aiohttp's server; which sockets there are, `sockets` knows.
"""

import asyncio
import functools
import logging
import ssl
from socket import AF_UNIX, socket

from aiohttp import web

from aioserve.server.access.acceptor import Acceptor
from aioserve.server.access.connections import Connection, Connections, Handshake

logger = logging.getLogger(__name__)

BACKLOG = 1024  # connections that the system keeps while the loop is busy

HANDSHAKE_SECONDS = 10.0  # of TLS


class Site:
    """On a socket that stays its owner's."""

    def __init__(
        self,
        server: web.Server,
        sock: socket,
        connections: Connections,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._server = server
        self._socket = sock
        self._connections = connections
        self._tls = tls
        self._acceptor: Acceptor | None = None  # one of these two
        self._listening: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Take connections on the socket from now on. Raises `OSError`."""
        if self._tls is not None:  # asyncio's own server would not tell before a handshake
            self._acceptor = Acceptor(self._socket, self._shake_hands, BACKLOG)
            return
        loop = asyncio.get_running_loop()
        begin = loop.create_unix_server if self._socket.family == AF_UNIX else loop.create_server
        make = functools.partial(Connection, self._connections, self._server)
        self._listening = await begin(make, sock=self._socket, backlog=BACKLOG)

    async def stop(self) -> None:
        """Stop taking connections; those that are open stay."""
        if self._acceptor is not None:
            await self._acceptor.close(0)
        if self._listening is not None:
            self._listening.close()

    async def _shake_hands(self, sock: socket) -> None:
        handshake = Handshake(sock)
        if not self._connections.add(handshake):
            sock.close()
            return
        make = functools.partial(Connection, self._connections, self._server, handshake)
        why = ""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make, sock, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_SECONDS
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
