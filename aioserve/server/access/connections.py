"""The connections of a server: accepted, limited in number and time, refused, and its sites.

Knows sockets, bytes and clocks, and aiohttp's server; knows nothing about what is asked. `sockets`
says which sockets there are. Bodies are waited for in `body`.
"""

import asyncio
import contextlib
import errno
import functools
import itertools
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import msgspec
from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from aioserve.config import AccessConfig
from aioserve.server.access.access import Refusals
from aioserve.server.protocol import ErrorInfo, ErrorResponse
from aioserve.server.running import make_id

_encoder = msgspec.json.Encoder()


class Refusal(NamedTuple):
    """The answer to a client of which no handler hears."""

    status: HTTPStatus
    message: str
    code: str
    request_id: str  # in the log, but for connections that are too many

    @property
    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        info = ErrorInfo(message=self.message, type=kind, code=self.code)
        return _encoder.encode(ErrorResponse(error=info))

    def whole(self, headers: str = "") -> bytes:
        """Return the answer as it is sent, with its head."""
        body = self.body
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}"
            f"X-Request-Id: {self.request_id}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


# Takes the connections of a listening socket, each in a task of its own. Knows sockets; its maker
# knows what becomes of a connection. It takes the place of asyncio's own server where a connection
# must be known before its handshake, or where one that comes at the end must not be lost: in Python
# 3.11 that forgets a connection which it accepts in the turn in which it is closed, and the client
# waits for ever.


FULL_SECONDS = 1.0  # until connections are taken again, after there were too many


class Acceptor:
    """An acceptor of the connections of one socket, until it is stopped."""

    def __init__(
        self,
        sock: socket.socket,
        enter: Callable[[socket.socket], Coroutine[Any, Any, object]],
        backlog: int,
    ) -> None:
        """`enter` has each connection, and what it raises is dropped; `backlog` are those
        that the system keeps while the loop is busy. Raises `OSError`.
        """
        self.socket = sock
        self._enter = enter
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[Any]] = set()
        self._is_stopped = False
        sock.setblocking(False)
        sock.listen(backlog)
        self._listen()

    def stop(self) -> None:
        """Leave those that come to the queue. Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            self._loop.remove_reader(self.socket.fileno())

    async def close(self, seconds: float) -> None:
        """Close the socket, and give up on those that have not entered within `seconds`."""
        self.stop()
        self.socket.close()
        if self._entering:
            _, late = await asyncio.wait(self._entering, timeout=seconds)
            for task in late:
                task.cancel()

    def _listen(self) -> None:
        if not self._is_stopped:
            self._loop.add_reader(self.socket.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError as error:  # no connection is left, or it has gone again
                if error.errno in (errno.EMFILE, errno.ENFILE):  # no descriptors: let some close
                    self._loop.remove_reader(self.socket.fileno())
                    self._loop.call_later(FULL_SECONDS, self._listen)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._enter(connection))
            self._entering.add(task)
            task.add_done_callback(self._entered)

    def _entered(self, task: asyncio.Task[Any]) -> None:
        self._entering.discard(task)
        if not task.cancelled():
            task.exception()


# How many connections there may be, and what each may keep waiting for how long. What is waited
# for: the head of a request, a client that reads its answer, the next request. Knows bytes and
# clocks; knows nothing about what is asked. Bodies are waited for in `body`.


logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0  # between looks at all connections: timeouts are late by at most as much

# Seconds in which a client that was refused may read why: closed at once, with more of it unread,
# the connection would be reset under the answer.
LINGER_SECONDS = 1.0

# Seconds between two reads of a body that is not wanted. A read brings up to 256 KiB, which take a
# tenth of a millisecond or two.
UNWANTED_SECONDS = 0.01

MAX_LOOKS = 64  # at connections, for one that is idle, when there are too many

OTHER_DESCRIPTORS = 256  # files, pipes and sockets besides those of clients

RETRY_SECONDS = 5  # A guess: connections come and go.

HEAD_END = b"\r\n\r\n"

# Seconds behind an answer until a connection is idle of which more has come: another request would
# be begun in the next turns of the loop, and until then nothing that is public tells of it.
SETTLE_SECONDS = 0.01


class Connections:
    """All connections of one process, whatever they listen on."""

    def __init__(self, settings: AccessConfig, most: int, refusals: Refusals) -> None:
        """`most` are open at once; `refusals` counts what is refused here."""
        self.settings = settings
        self.refusals = refusals
        self._most = most
        self._open: dict[Connection | Handshake, None] = {}  # the longest silent first
        self._loop = asyncio.get_running_loop()
        self._sweeping = self._loop.call_later(SWEEP_SECONDS, self._sweep)

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Stop the sweep that ends slow connections."""
        self._sweeping.cancel()

    def add(self, connection: "Connection | Handshake") -> bool:
        """It is open. If there are too many, the one that is idle longest makes room; False if none
        is: then it is not to stay. Asked here and not when it is accepted: of those some never
        come, and many may be accepted in one turn of the loop.
        """
        if len(self._open) >= self._most and not self._make_room():
            self.count("too_many_connections")
            return False
        self._open[connection] = None
        return True

    def note(self, connection: "Connection | Handshake") -> None:
        """Count `connection` as the one that was silent for the shortest time."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def discard(self, connection: "Connection | Handshake") -> None:
        """Forget `connection`, which is closed or about to be."""
        self._open.pop(connection, None)

    def count(self, reason: str) -> None:
        """Count a refusal before any key is known."""
        self.refusals[reason, ""] += 1

    def _make_room(self) -> bool:
        for connection in list(itertools.islice(self._open, MAX_LOOKS)):
            if connection.is_idle:
                self.count("idle_connection_closed")
                self.discard(connection)
                connection.drop()
                return True
            self.note(connection)
        return False

    def _sweep(self) -> None:
        self._sweeping = self._loop.call_later(SWEEP_SECONDS, self._sweep)
        now = self._loop.time()
        for connection in list(self._open):
            connection.check(now)


def allow_connections(most: int) -> None:
    """Raise the limit of open files to `most` connections, for child processes too; warn if the
    system does not allow it. Elsewhere than on Unix nothing happens.
    """
    try:
        import resource
    except ImportError:
        return
    needed = most + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            logger.warning(
                "access.max_connections is %d, and a process may have %d descriptors (ulimit -n): "
                "at most %d connections will be open",
                *(most, allowed, max(0, allowed - OTHER_DESCRIPTORS)),
            )


class Handshake:
    """A connection that is not encrypted yet. It counts, and is idle: else the silent ones, however
    many, would keep descriptors from others.
    """

    is_idle = True

    def __init__(self, sock: socket.socket) -> None:
        """Make a handshake on an accepted socket, which stays its owner's."""
        self._socket = sock
        self.is_dropped = False

    def drop(self) -> None:
        """Let whatever the connection waits for fail at once."""
        self.is_dropped = True
        with contextlib.suppress(OSError):  # it has gone by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def check(self, now: float) -> None:
        """Do nothing: the loop looks at the time of a handshake."""


class Connection(web.RequestHandler):
    """One connection of aiohttp's, with an eye on the clock.

    It overrides public methods alone, and finds the end of a head by itself: what aiohttp keeps in
    private is not looked at.
    """

    __slots__ = (
        "_behind_head",
        "_body",
        "_connections",
        "_handshake",
        "_head_bytes",
        "_head_end",
        "_head_since",
        "_is_asked",
        "_is_refused",
        "_is_unwanted",
        "_link",
        "_settled_at",
        "_unread",
    )

    def __init__(
        self, connections: Connections, server: web.Server, handshake: Handshake | None = None
    ) -> None:
        """Make a connection, which takes the place of its handshake, if there was one."""
        settings = connections.settings
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=settings.keep_alive_timeout,
            max_line_size=settings.max_header_bytes,
            max_field_size=settings.max_header_bytes,
            auto_decompress=False,  # refused by name; aiohttp drops connections over bad ones
            access_log=None,  # type: ignore[arg-type] # as runners take it
            tcp_keepalive=False,  # inherited from the listening socket
        )
        self._connections = connections
        self._handshake = handshake
        self._link: asyncio.Transport | None = None
        self._is_asked = False  # a request, whose head has come and that is not answered
        self._is_refused = False  # what still comes is not read
        self._settled_at = 0.0  # until then another request may be there
        self._body: StreamReader | None = None  # of the last request
        self._behind_head = 0  # bytes that have come behind its head
        self._head_since: float | None = None  # of a head that has begun
        self._head_bytes = 0
        self._head_end = b""  # the last bytes of it that came
        self._unread: tuple[int, float] | None = None  # bytes, and when it read some last
        self._is_unwanted = False  # what is left of the body that is coming

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered: it has not come, or not all of it has."""
        if self._is_refused or self._is_body_coming:
            return True
        return not self._is_asked and asyncio.get_running_loop().time() >= self._settled_at

    @property
    def _is_body_coming(self) -> bool:
        return self._body is not None and not self._body.is_eof()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link = cast(asyncio.Transport, transport)  # uvloop's do not subclass it
        if self._handshake is not None:
            self._connections.discard(self._handshake)
        if self._connections.add(self):
            super().connection_made(transport)
            return
        self._is_refused = True
        why = "this server has as many connections as it takes, all of them busy"
        code = "too_many_connections"
        refusal = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, why, code, make_id())
        self._link.write(refusal.whole(f"Retry-After: {RETRY_SECONDS}\r\n"))
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._link.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._connections.note(self)
        is_body = self._is_body_coming  # of a request that may be answered
        if self._is_asked or is_body:
            self._behind_head += len(data)
        elif not self._take_head(data):
            return
        super().data_received(data)
        if is_body and self._is_unwanted:
            self._rest()

    def begin(self, body: StreamReader) -> None:
        """A request is answered from now on; some of its body may still be coming."""
        self._is_asked, self._body, self._is_unwanted = True, body, False
        self._head_since = None

    async def finish_response(self, *args: Any, **options: Any) -> tuple[web.StreamResponse, bool]:
        """Finish a response as aiohttp does: it is the last that is done for a request."""
        try:
            result = await super().finish_response(*args, **options)
            if self._is_refused:
                await asyncio.sleep(LINGER_SECONDS)
            return result
        finally:
            self._is_asked, self._head_since = False, None
            if self._body is not None and self._behind_head > self._body.total_bytes:
                self._settled_at = asyncio.get_running_loop().time() + SETTLE_SECONDS

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer an error as aiohttp does, with a traceback in the log, where it is our fault."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has gone: it cannot be told
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        refusal = self._refusal_of(exc, message or "")
        self._note(refusal)
        self._is_refused = True
        answer = web.Response(
            body=refusal.body,
            status=refusal.status,
            headers={"X-Request-Id": refusal.request_id},
            content_type="application/json",
        )
        answer.force_close()
        return answer

    def resume_writing(self) -> None:
        self._unread = None  # it has read a good deal
        super().resume_writing()

    def drop(self) -> None:
        """Close it at once, whatever its client has not read."""
        link = self._link
        self.force_close()
        if link is not None and link.get_write_buffer_size():
            link.abort()

    def refuse_body(self) -> None:
        """What is still to come of it is of no use: it is read, so that the client comes to read
        why, and slowly.
        """
        self._is_unwanted = True

    def check(self, now: float) -> None:
        """Give up on a head that does not end, and on an answer that is not read."""
        settings = self._connections.settings
        if self._head_since is not None and now - self._head_since > settings.header_timeout:
            why = f"the head of the request took more than {settings.header_timeout:g} s"
            self._refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, why, "slow_head", make_id()))
        left = 0 if self._link is None else self._link.get_write_buffer_size()
        if not left:
            self._unread = None
        elif self._unread is None or left < self._unread[0]:  # it has read: nothing else takes away
            self._unread = left, now
        else:
            self._unread = left, self._unread[1]
        if self._unread is not None and now - self._unread[1] > settings.send_timeout:
            self._connections.count("unread_answer")
            logger.info("a client has read nothing for %g s: closed", settings.send_timeout)
            if self._link is not None:
                self._link.abort()  # what is in its buffer would keep it open for ever

    def _rest(self) -> None:
        if self._link is not None and not self._link.is_closing():
            self._link.pause_reading()
            asyncio.get_running_loop().call_later(UNWANTED_SECONDS, self._go_on)

    def _go_on(self) -> None:
        if self._link is not None and not self._link.is_closing():
            self._link.resume_reading()

    def _take_head(self, data: bytes) -> bool:
        """Count the bytes of a head. False if it is too large: then it was refused."""
        if self._head_since is None and not data.startswith((b"\r", b"\n")):
            size = data.find(HEAD_END) + len(HEAD_END)
            if len(HEAD_END) <= size <= self._connections.settings.max_header_bytes:
                self._is_asked, self._behind_head = True, len(data) - size  # most: it came at once
                return True
        if self._head_since is None:
            data = data.lstrip(b"\r\n")
            if not data:
                return True  # some clients end their bodies so: it is no beginning (RFC 9112, 2.2)
            self._head_since = asyncio.get_running_loop().time()
            self._head_bytes, self._head_end = 0, b""
        data = self._head_end + data
        end = data.find(HEAD_END)
        size = len(data) if end < 0 else end + len(HEAD_END)
        self._head_bytes += size - len(self._head_end)
        if self._head_bytes > self._connections.settings.max_header_bytes:
            self._refuse(self._head_too_large())
            return False
        if end >= 0:
            self._is_asked, self._head_since = True, None
            self._behind_head = len(data) - size
        self._head_end = data[-len(HEAD_END) + 1 :]
        return True

    def _refusal_of(self, error: BaseException, message: str) -> Refusal:
        if isinstance(error, LineTooLong) or message.startswith("Too many headers"):
            return self._head_too_large()
        why = message.strip().partition("\n")[0].rstrip(":")[:100]
        message = f"this is not HTTP/1.1: {why}"
        return Refusal(HTTPStatus.BAD_REQUEST, message, "bad_http", make_id())

    def _head_too_large(self) -> Refusal:
        return Refusal(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            "the request line and the headers are more than "
            f"{self._connections.settings.max_header_bytes} bytes together, or too many",
            "head_too_large",
            make_id(),
        )

    def _note(self, refusal: Refusal) -> None:
        self._connections.count(refusal.code)
        who = self.peername or "a client"
        logger.info("%s (%s) refused: %s", who, refusal.request_id, refusal.message)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer without a handler, and close."""
        self._note(refusal)
        self._is_refused, self._head_since = True, None
        self.close()
        if self.transport is not None:
            self.transport.write(refusal.whole())
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self.force_close)


# Where an application listens: a bound socket, plain or encrypted, with a limit on connections.
# Knows aiohttp's server; which sockets there are, `sockets` knows.


BACKLOG = 1024  # connections that the system keeps while the loop is busy

HANDSHAKE_SECONDS = 10.0  # of TLS


class Site:
    """A site on a socket that stays its owner's."""

    def __init__(
        self,
        server: web.Server,
        sock: socket.socket,
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
        # The system probes silent clients. Connections inherit this of the socket that they come
        # by; to set it for each, as aiohttp does, takes 6 calls to the system.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is not None:  # asyncio's own server would not tell before a handshake
            self._acceptor = Acceptor(self._socket, self._shake_hands, BACKLOG)
            return
        loop = asyncio.get_running_loop()
        begin = (
            loop.create_unix_server if self._socket.family == socket.AF_UNIX else loop.create_server
        )
        make = functools.partial(Connection, self._connections, self._server)
        self._listening = await begin(make, sock=self._socket, backlog=BACKLOG)

    async def stop(self) -> None:
        """Stop taking connections; those that are open stay."""
        if self._acceptor is not None:
            await self._acceptor.close(0)
        if self._listening is not None:
            self._listening.close()

    async def _shake_hands(self, sock: socket.socket) -> None:
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
