"""What a replica's KV cache holds and how busy it is, told to any number of routers over ZeroMQ.

A router that comes late, or has missed something, gets all of it again. Routers tell what they have
sent there, and each hears the sum of the others. Hashes tell which prompts were asked, so they are
encrypted (CurveZMQ) and told only to clients that show the ticket which Ray hands to its routers.
Knows hashes of blocks; does not know Ray, tokens, nor routing.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from aioserve.config import EngineConfig
from aioserve.errors import AioserveError, ConfigError, EngineDeadError
from aioserve.fleet.ray.line import LineTicket
from aioserve.fleet.routing import ReplicaReport, SentLoad
from aioserve.kv_cache.block_pool import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

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

# What a router says, behind the token.
FOLLOW, ATTACH, LOAD = b"follow", b"attach", b"load"

NO_LOAD = SentLoad()


class Ticket(msgspec.Struct, frozen=True):
    """A ticket with which a router can follow a feed; Ray carries it as text."""

    address: str
    server_key: bytes  # the feed's public key
    token: bytes  # what a router says first in each message
    model: str = ""  # what the replica has loaded: its tokens mean nothing to another model

    def encode(self) -> str:
        """Return the hashes as one text that Ray can send."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "Ticket":
        """Read a ticket. Raises `msgspec.MsgspecError` for a text that `encode` did not write."""
        return msgspec.json.decode(text, type=cls)


def model_of(config: EngineConfig) -> str:
    """Return what tells models apart whose replicas live side by side while an application
    changes.
    """
    return " ".join(filter(None, (config.model.model, config.model.revision)))


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """The changes since the message before, or, with `is_everything`, all that can be found."""

    number: int  # one more than that of the message before, to this router
    is_everything: bool
    stored: list[bytes]
    removed: list[bytes]
    report: ReplicaReport | None = None  # how busy the replica is, where that has changed
    others: SentLoad | None = None  # what the other routers have sent, where that has changed


class Attached(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a router that asks for a line of its own."""

    line: LineTicket | None
    refusal: str = ""  # why there is none


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Changes).decode
_decode_load = msgspec.msgpack.Decoder(SentLoad).decode
_decode_attached = msgspec.msgpack.Decoder(Attached).decode


class KVFeed:
    """The replica's side. All of it on the loop of its engine."""

    def __init__(
        self,
        host: str,
        get_report: Callable[[], ReplicaReport | None] = lambda: None,
        open_line: Callable[[], LineTicket] | None = None,
        model: str = "",
    ) -> None:
        """Binds a free port of `host`, an address of this machine that routers can reach;
        `get_report` says how busy the replica is, and `open_line` gives a router a line to it;
        `model` is that of the ticket. Raises `ConfigError` if the ZeroMQ here cannot encrypt.
        """
        if not zmq.has("curve"):
            raise ConfigError(
                "this pyzmq was built without CURVE, and block hashes are not told in the clear: "
                "install the wheel of the package index"
            )
        public, secret = zmq.curve_keypair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
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
        self.ticket = Ticket(f"tcp://{bracketed}:{port}", public, token, model)
        self._held: dict[bytes, None] = {}  # oldest first
        self._changed: dict[bytes, bool] = {}  # since the last message: stored, or removed
        self._is_cleared = False
        self._numbers: dict[bytes, int] = {}  # of the last message, by router
        self._get_report = get_report
        self._report: ReplicaReport | None = None  # that was told last
        self._open_line = open_line
        self._loads: dict[bytes, SentLoad] = {}  # by router, as each told last
        self._told_loads: dict[bytes, SentLoad] = {}  # of the others, by router
        self._is_noted = asyncio.Event()  # an event, that is not told yet
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer and to tell."""
        self._telling = asyncio.create_task(self._tell())

    async def close(self) -> None:
        """Stop answering routers and telling them which blocks are cached."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        self._context.destroy(linger=0)

    def note(self, event: KVEvent) -> None:
        """Note a KV event for the next message; pass it to `AsyncEngine(on_kv_event=...)`."""
        self._is_noted.set()
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

    def _answer_all(self) -> None:
        """Answer what routers have sent since the last time."""
        while True:
            try:
                router, *said = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not said or not hmac.compare_digest(said[0], self.ticket.token):
                continue
            match said[1:]:
                case [kind] if kind == FOLLOW:
                    self._flush()  # what it is told below holds that already
                    self._numbers[router] = 0
                    self._told_loads.pop(router, None)
                    others = self._others_of(router)
                    everything = Changes(0, True, list(self._held), [], self._report, others)
                    self._send(router, _encode(everything))
                case [kind] if kind == ATTACH:
                    self._send(router, _encode(self._attach()))
                case [kind, load] if kind == LOAD and router in self._numbers:
                    self._loads[router] = _decode_load(load)

    def _attach(self) -> Attached:
        try:
            if self._open_line is None:
                return Attached(None, "this feed leads to no engine")
            return Attached(self._open_line())
        except (AioserveError, OSError) as error:
            return Attached(None, str(error))

    async def _tell(self) -> None:
        loop = asyncio.get_running_loop()
        last = reported = loop.time()
        while True:
            await self._pause()
            self._answer_all()
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
            elif self._loads or self._told_loads:
                self._flush_loads()

    async def _pause(self) -> None:
        """Wait until there may be something to tell: with nothing new, a turn is a waste."""
        if not self._loads:  # what routers tell each other is told soon, and asked for here
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_SECONDS):
                    await self._is_noted.wait()
        self._is_noted.clear()
        await asyncio.sleep(FLUSH_SECONDS)

    def _flush(self, report: ReplicaReport | None = None) -> None:
        is_everything, self._is_cleared = self._is_cleared, False
        changed, self._changed = self._changed, {}
        stored = [block_hash for block_hash, is_stored in changed.items() if is_stored]
        removed = [block_hash for block_hash, is_stored in changed.items() if not is_stored]
        for router in list(self._numbers):
            self._tell_one(router, is_everything, stored, removed, report, self._others_of(router))

    def _flush_loads(self) -> None:
        """Tell each router what the others have sent, if that has changed."""
        for router in list(self._numbers):
            if (others := self._others_of(router)) is not None:
                self._tell_one(router, False, [], [], None, others)

    def _others_of(self, router: bytes) -> SentLoad | None:
        """Return what the other routers have sent; None if that is what this router was told
        last.
        """
        if not self._loads and router not in self._told_loads:
            return None
        sums = [load for key, load in self._loads.items() if key != router]
        others = SentLoad(
            sum(load.work for load in sums),
            sum(load.num_requests for load in sums),
            sum(load.num_unstarted_tokens for load in sums),
        )
        if others == self._told_loads.get(router, NO_LOAD):
            return None
        self._told_loads[router] = others
        return others

    def _tell_one(self, router: bytes, *changes: Any) -> None:
        self._numbers[router] += 1
        self._send(router, _encode(Changes(self._numbers[router], *changes)))

    def _send(self, router: bytes, message: bytes) -> None:
        try:
            self._socket.send_multipart([router, message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            for by_router in (self._numbers, self._loads, self._told_loads):
                by_router.pop(router, None)


class Listener:
    """A listener to what a feed tells. This one does nothing."""

    def on_event(self, event: KVEvent) -> None:
        """A block can be found in the replica, or no longer."""

    def on_report(self, report: ReplicaReport) -> None:
        """How busy the replica is; with each message."""

    def on_others(self, load: SentLoad) -> None:
        """Note what the other routers have sent to the replica and has not ended."""

    def own_load(self) -> SentLoad | None:
        """Return what this router has sent there and has not ended; None: no other router is
        told.
        """
        return None


async def follow(ticket: Ticket, listener: Listener, silence: float = SILENCE_SECONDS) -> None:
    """Tell `listener`, until cancelled, what the replica tells that gave the ticket.

    What was missed is told as `AllBlocksCleared` and all that there is. Stored blocks come without
    their tokens and parents.
    """
    context = zmq.asyncio.Context()
    try:
        while True:
            socket = _dealer(context, ticket)
            telling = asyncio.create_task(_tell_load(socket, ticket.token, listener))
            try:
                await _follow(socket, ticket.token, listener, silence)
            finally:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
                socket.close(0)
    finally:
        context.destroy(linger=0)


async def attach(ticket: Ticket) -> LineTicket:
    """Ask the replica that gave the ticket for a line. Raises `EngineDeadError` if it refuses;
    waits for its answer.
    """
    context = zmq.asyncio.Context()
    try:
        socket = _dealer(context, ticket)
        await socket.send_multipart([ticket.token, ATTACH])
        attached = _decode_attached(await socket.recv())
    finally:
        context.destroy(linger=0)
    if attached.line is None:
        raise EngineDeadError(attached.refusal)
    return attached.line


def _dealer(context: zmq.asyncio.Context, ticket: Ticket) -> zmq.asyncio.Socket:
    public, secret = zmq.curve_keypair()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    socket.setsockopt(zmq.CURVE_SERVERKEY, ticket.server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.connect(ticket.address)
    return socket


async def _tell_load(socket: zmq.asyncio.Socket, token: bytes, listener: Listener) -> None:
    """Tell the replica what this router has sent it, whenever that has changed."""
    told = NO_LOAD
    while (load := listener.own_load()) is not None:
        if load != told:
            told = load
            await socket.send_multipart([token, LOAD, _encode(load)])
        await asyncio.sleep(FLUSH_SECONDS)


async def _follow(
    socket: zmq.asyncio.Socket, token: bytes, listener: Listener, silence: float
) -> None:
    """Read messages until one is missing, or none has come for `silence` seconds."""
    await socket.send_multipart([token, FOLLOW])
    expected = 0
    report: ReplicaReport | None = None
    while True:
        try:
            async with asyncio.timeout(silence):  # `wait_for` may swallow a cancellation
                message = await socket.recv()
        except TimeoutError:
            return
        changes = _decode(message)
        if changes.number != expected:
            logger.warning("messages of a KV feed were lost: asking for all of it again")
            return
        expected += 1
        for event in _events(changes):
            listener.on_event(event)
        report = changes.report or report
        if report is not None:  # a message without one says that it is still so
            listener.on_report(report)
        if changes.others is not None or changes.number == 0:
            listener.on_others(changes.others or NO_LOAD)


def _events(changes: Changes) -> Iterator[KVEvent]:
    if changes.is_everything:
        yield AllBlocksCleared()
    for block_hash in changes.removed:
        yield BlockRemoved(block_hash)
    for block_hash in changes.stored:
        yield BlockStored(block_hash, None, [])
