"""What a replica's KV cache holds and how busy it is, told to any number of routers over ZeroMQ.

A router that comes late, or has missed something, gets all of it again. Hashes tell which prompts
were asked, so they are encrypted (CurveZMQ) and told only to clients that show the ticket which
Ray hands to its routers. Knows hashes of blocks; does not know Ray, tokens, nor routing.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable, Iterator

import msgspec
import zmq
import zmq.asyncio

from aioserve.errors import ConfigError
from aioserve.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from aioserve.routing import ReplicaReport

logger = logging.getLogger(__name__)

# Seconds between two messages about what changed. Guesses: a router that hears of a block that
# late sends a request to the wrong replica now and then, and nothing worse.
FLUSH_SECONDS = 0.02
REPORT_SECONDS = 0.1  # between two reports of how busy it is, while that changes
HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0  # after which a router asks for all of it again

# Messages that wait for a router which does not read; then it is forgotten, until it asks again.
MAX_QUEUED = 1_000

TOKEN_BYTES = 32


class Ticket(msgspec.Struct, frozen=True):
    """What a router must have to follow a feed; as text, what Ray carries."""

    address: str
    server_key: bytes  # the feed's public key
    token: bytes  # what a router says first

    def encode(self) -> str:
        """The hashes as one text that Ray can send."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "Ticket":
        """Read a ticket. Raises `msgspec.MsgspecError` for a text that `encode` did not write."""
        return msgspec.json.decode(text, type=cls)


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """What happened since the message before, or, with `is_everything`, all that can be found."""

    number: int  # one more than that of the message before, to this router
    is_everything: bool
    stored: list[bytes]
    removed: list[bytes]
    report: ReplicaReport | None = None  # how busy the replica is, where that has changed


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Changes).decode


class KVFeed:
    """The replica's side. All of it on the loop of its engine."""

    def __init__(
        self, host: str, get_report: Callable[[], ReplicaReport | None] = lambda: None
    ) -> None:
        """Binds a free port of `host`, an address of this machine that routers can reach;
        `get_report` says how busy the replica is. Raises `ConfigError` if the ZeroMQ here cannot
        encrypt.
        """
        if not zmq.has("curve"):
            raise ConfigError(
                "this pyzmq was built without CURVE, and block hashes are not told in the clear: "
                "install the wheel of the package index"
            )
        public, secret = zmq.curve_keypair()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # to a router that has gone is an error
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        bracketed = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{bracketed}")
        token = secrets.token_bytes(TOKEN_BYTES)
        self.ticket = Ticket(f"tcp://{bracketed}:{port}", public, token)
        self._held: dict[bytes, None] = {}  # oldest first
        self._changed: dict[bytes, bool] = {}  # since the last message: stored, or removed
        self._is_cleared = False
        self._numbers: dict[bytes, int] = {}  # of the last message, by router
        self._get_report = get_report
        self._report: ReplicaReport | None = None  # that was told last
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to answer and to tell."""
        self._tasks = [asyncio.create_task(self._answer()), asyncio.create_task(self._tell())]

    async def close(self) -> None:
        """Stop answering routers and telling them which blocks are cached."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def note(self, event: KVEvent) -> None:
        """Note a KV event for the next message; pass it to `AsyncEngine(on_kv_event=...)`."""
        if isinstance(event, BlockStored):
            self._held[event.block_hash] = None
            self._changed[event.block_hash] = True
        elif isinstance(event, BlockRemoved):
            self._held.pop(event.block_hash, None)
            self._changed[event.block_hash] = False
        elif isinstance(event, AllBlocksCleared):
            self._held.clear()
            self._changed.clear()
            self._is_cleared = True

    async def _answer(self) -> None:
        while True:
            router, *said = await self._socket.recv_multipart()
            if not hmac.compare_digest(b"".join(said), self.ticket.token):
                continue
            self._flush()  # what it is told below holds that already
            self._numbers[router] = 0
            self._send(router, Changes(0, True, list(self._held), [], self._report))

    async def _tell(self) -> None:
        loop = asyncio.get_running_loop()
        last = reported = loop.time()
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            report, now = None, loop.time()
            if self._numbers and now - reported > REPORT_SECONDS:
                reported = now
                report = self._get_report()
                report = None if report == self._report else report
                self._report = report or self._report
            is_due = report is not None or now - last > HEARTBEAT_SECONDS
            if self._changed or self._is_cleared or is_due:
                last = now
                self._flush(report)

    def _flush(self, report: ReplicaReport | None = None) -> None:
        is_everything, self._is_cleared = self._is_cleared, False
        changed, self._changed = self._changed, {}
        stored = [block_hash for block_hash, is_stored in changed.items() if is_stored]
        removed = [block_hash for block_hash, is_stored in changed.items() if not is_stored]
        for router in list(self._numbers):
            self._numbers[router] += 1
            number = self._numbers[router]
            self._send(router, Changes(number, is_everything, stored, removed, report))

    def _send(self, router: bytes, changes: Changes) -> None:
        try:
            # The shadow of the socket: the asyncio one would queue without bound by itself.
            zmq.Socket.shadow(self._socket).send_multipart([router, _encode(changes)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            del self._numbers[router]


async def follow(
    ticket: Ticket,
    on_event: Callable[[KVEvent], None],
    on_report: Callable[[ReplicaReport], None] = lambda report: None,
    silence: float = SILENCE_SECONDS,
) -> None:
    """Tell `on_event`, until cancelled, what the replica holds that gave the ticket, and
    `on_report`, with each message, how busy it is.

    What was missed is told as `AllBlocksCleared` and all that there is. Stored blocks come without
    their tokens and parents.
    """
    public, secret = zmq.curve_keypair()
    context = zmq.asyncio.Context()
    try:
        while True:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
            socket.setsockopt(zmq.CURVE_SERVERKEY, ticket.server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.connect(ticket.address)
            try:
                await _follow(socket, ticket.token, on_event, on_report, silence)
            finally:
                socket.close(0)
    finally:
        context.destroy(linger=0)


async def _follow(
    socket: zmq.asyncio.Socket,
    token: bytes,
    on_event: Callable[[KVEvent], None],
    on_report: Callable[[ReplicaReport], None],
    silence: float,
) -> None:
    """Until a message is missing, or none has come for `silence` seconds."""
    await socket.send(token)
    expected = 0
    report: ReplicaReport | None = None
    while True:
        try:
            message = await asyncio.wait_for(socket.recv(), silence)
        except TimeoutError:
            return
        changes = _decode(message)
        if changes.number != expected:
            logger.warning("messages of a KV feed were lost: asking for all of it again")
            return
        expected += 1
        for event in _events(changes):
            on_event(event)
        report = changes.report or report
        if report is not None:  # a message without one says that it is still so
            on_report(report)


def _events(changes: Changes) -> Iterator[KVEvent]:
    if changes.is_everything:
        yield AllBlocksCleared()
    for block_hash in changes.removed:
        yield BlockRemoved(block_hash)
    for block_hash in changes.stored:
        yield BlockStored(block_hash, None, [])
