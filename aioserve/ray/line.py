"""A line over TCP, encrypted (CurveZMQ), that notices when its other end is gone.

One replica's door listens, one ingress connects: the key of the door is told to that ingress alone.
Knows bytes and keys.
"""

import asyncio
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from aioserve.workers.line import Line, OnMessage

# Milliseconds between two signs of life, and after which a silent end counts as gone: its machine
# or the network is. A process that ends is noticed at once. Guesses.
HEARTBEAT_MS, SILENCE_MS = 2_000, 10_000


class LineTicket(msgspec.Struct, frozen=True, array_like=True):
    """What an ingress must have to connect to a door."""

    address: str
    server_key: bytes


class PeerLine(Line):
    """To be used, and closed, on the loop on which it was made."""

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
        """As `Line`; `on_gone` is called when the other end, once there, is there no more."""
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
        """What was not read by the other end is lost. Idempotent."""
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
    """A line on a free port of `host`, an address of this machine, and what leads to it. Raises
    `OSError`.
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
