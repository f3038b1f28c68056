"""A line over TCP, encrypted (CurveZMQ), that notices when its other end is gone.

A replica's door has a line for each ingress, by which requests come.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from aioserve.engine import AsyncEngine
from aioserve.engine.clock import clock_of
from aioserve.errors import EngineDeadError
from aioserve.fleet.workers.host import Forwarder
from aioserve.fleet.workers.messages import Add, Line, MessageToEngine, OnMessage, Quit
from aioserve.request import RequestSpec

# Milliseconds between two signs of life, and after which a silent end counts as gone: its machine
# or the network is. A process that ends is noticed at once. Guesses.
HEARTBEAT_MS, SILENCE_MS = 2_000, 10_000


class LineTicket(msgspec.Struct, frozen=True, array_like=True):
    """A ticket with which an ingress can connect to a door."""

    address: str
    server_key: bytes


class PeerLine(Line):
    """A line to a peer, to be used, and closed, on the loop on which it was made."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        listens: bool,
        on_message: OnMessage,
        on_room: Callable[[], None],
        on_gone: Callable[[], None],
        give_keys: Callable[[zmq.Socket[bytes]], None],
    ) -> None:
        """Make a `Line`; `on_gone` is called when the other end, once there, is there no more."""
        self._on_gone = on_gone
        self._give_keys = give_keys
        self._own_loop = asyncio.get_running_loop()
        super().__init__(
            context,
            address,
            listens=listens,
            on_message=on_message,
            on_room=on_room,
            prepare=self._prepare,
        )

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        self._give_keys(socket)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._own_loop.add_reader(self._monitor.fileno(), self._hear)
        self._own_loop.call_soon(self._hear)  # the descriptor tells nothing before a first look

    def close(self) -> None:
        """Close the line; what the other end has not read is lost. Idempotent."""
        if not self._socket.closed:
            self._own_loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
        super().close()

    def _hear(self) -> None:
        is_gone = False
        while not self._monitor.closed and int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            is_gone = True  # the one event that was asked for
        if is_gone:
            self._look()  # what it said before is there
            self._on_gone()


def listening_line(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    on_message: OnMessage,
    on_room: Callable[[], None],
    on_gone: Callable[[], None],
) -> tuple[PeerLine, LineTicket]:
    """Return a line on a free port of `host`, an address of this machine, and what leads to it.
    Raises `OSError`.
    """
    public, secret = zmq.curve_keypair()

    def give_keys(socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

    bracketed = f"[{host}]" if ":" in host else host
    line = PeerLine(
        context,
        f"tcp://{bracketed}:*",
        listens=True,
        on_message=on_message,
        on_room=on_room,
        on_gone=on_gone,
        give_keys=give_keys,
    )
    return line, LineTicket(line.address, public)


def connecting_line(
    context: zmq.Context[zmq.Socket[bytes]],
    ticket: LineTicket,
    on_message: OnMessage,
    on_room: Callable[[], None],
    on_gone: Callable[[], None],
) -> PeerLine:
    """The other end of the line that `ticket` leads to. Raises `OSError`."""
    public, secret = zmq.curve_keypair()

    def give_keys(socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, ticket.server_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

    return PeerLine(
        context,
        ticket.address,
        listens=False,
        on_message=on_message,
        on_room=on_room,
        on_gone=on_gone,
        give_keys=give_keys,
    )


# A replica's door: each ingress has a line of its own to the engine, and requests come by that.
# Knows lines and the engine; does not know Ray.


logger = logging.getLogger(__name__)

GREETING_SECONDS = 30.0  # in which an ingress that asked for a line says hello. A guess
LEAVING_SECONDS = 5.0  # in which every ingress hangs up, when the replica goes. A guess
LOOK_SECONDS = 0.05  # between two looks whether requests are left, when the replica goes


class IngressClient(Forwarder):
    """One ingress, from before it is connected."""

    def __init__(
        self,
        engine: AsyncEngine,
        name: str,
        open_line: Callable[[OnMessage, Callable[[], None], Callable[[], None]], PeerLine],
        on_gone: Callable[["IngressClient"], None],
    ) -> None:
        """Raises `OSError`, and `EngineDeadError` where there is no engine any more."""
        self._clock = clock_of(asyncio.get_running_loop())
        self._on_gone = on_gone
        super().__init__(
            engine, name, lambda message, room: open_line(message, room, self._has_gone)
        )

    @property
    def is_greeted(self) -> bool:
        """Whether the ingress has said hello."""
        return self._is_welcome

    def quit(self) -> None:
        """Have the ingress hang up, once it has read what was said before."""
        self._say(Quit(0))

    def welcome(self) -> None:
        """Nothing: an ingress asks what replicas are before it has a line."""

    def refuse(self) -> None:
        self._on_gone(self)

    def received(self, spec: RequestSpec, add: Add) -> RequestSpec:
        """Return the spec with times of this machine: those of the ingress are of another clock."""
        now = self._clock()
        deadline = None if add.timeout is None else now + add.timeout
        spec = msgspec.structs.replace(spec, arrival_time=now, deadline=deadline)
        return super().received(spec, add)

    def take(self, said: MessageToEngine) -> None:
        logger.error("%s says %s, which is for an engine with workers", self.name, type(said))

    def _has_gone(self) -> None:
        self._on_gone(self)


class Door:
    """All lines of one replica. On the loop of its engine, which has been started."""

    def __init__(self, engine: AsyncEngine, host: str) -> None:
        """`host` is an address of this machine that every ingress can reach."""
        self._engine = engine
        self._host = host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._clients: set[IngressClient] = set()
        self._num_opened = 0
        self._is_leaving = False

    @property
    def num_requests(self) -> int:
        """Requests that live, of every ingress."""
        return sum(client.num_requests for client in self._clients)

    def open(self) -> LineTicket:
        """Return a line for one more ingress. Raises `EngineDeadError` from a replica whose engine
        has died, or that is about to go, and `OSError`.
        """
        if self._engine.errored is not None:
            raise EngineDeadError(f"the engine has died: {self._engine.errored}")
        if self._is_leaving:
            raise EngineDeadError("this replica is about to go")
        tickets: list[LineTicket] = []

        def open_line(*callbacks: Any) -> PeerLine:
            line, ticket = listening_line(self._context, self._host, *callbacks)
            tickets.append(ticket)
            return line

        self._num_opened += 1
        client = IngressClient(self._engine, f"ingress-{self._num_opened}", open_line, self._close)
        self._clients.add(client)
        asyncio.get_running_loop().call_later(GREETING_SECONDS, self._close_silent, client)
        return tickets[0]

    async def leave(self) -> None:
        """Return when all requests have ended and every ingress has hung up."""
        self._is_leaving = True
        while self.num_requests:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        for client in self._clients:
            client.quit()
        try:
            async with asyncio.timeout(LEAVING_SECONDS):
                while self._clients:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            logger.warning("%d lines were not closed by their other ends", len(self._clients))

    def close(self) -> None:
        """Close all lines; what is left of requests is aborted."""
        for client in list(self._clients):
            self._close(client)
        self._context.destroy(linger=0)

    def _close_silent(self, client: IngressClient) -> None:
        if client in self._clients and not client.is_greeted:
            self._close(client)

    def _close(self, client: IngressClient) -> None:
        if client in self._clients:
            self._clients.discard(client)
            if num_dropped := client.close():
                logger.error("%s is gone: its %d requests are aborted", client.name, num_dropped)
