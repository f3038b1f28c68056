"""One end of the connection between a worker and the engine: a ZeroMQ pair on the event loop.

Whole messages, in order, and nothing ever waits. Knows bytes; what they say is `messages`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

#: Memory that goes along with a message, uncopied: it is not changed any more.
Attachments = Sequence[Any]

#: Gets a message, and what is attached to it as memoryviews.
OnMessage = Callable[[bytes, Attachments], None]

# Messages that are on their way at most, on each side of the connection, before a sender is told
# that there is no room; the system's own buffer holds some more. A guess: steps for a blink.
MAX_QUEUED = 32

# Messages that are read before others have a turn on the loop. A guess.
MAX_AT_ONCE = 64


class Line:
    """To be used, and closed, on the loop on which it was made."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        listens: bool,
        on_message: OnMessage,
        on_room: Callable[[], None],
        prepare: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
    ) -> None:
        """`listens`: it is the end that is there first. `on_message` gets what the other end sent;
        `on_room` is called when there is room again after a `send` that found none; `prepare` gets
        the socket before it is bound or connected. Raises `OSError`.
        """
        self._on_message = on_message
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        self._is_full = False
        self._is_due = False  # the loop will look at the socket anyway
        try:
            self._socket = _paired(context, address, listens, prepare)
        except zmq.ZMQError as error:
            raise OSError(error.errno, zmq.strerror(error.errno or 0), address) from error
        self._fd = self._socket.fileno()
        # The descriptor tells that something has changed, once; what, must be asked each time.
        self._loop.add_reader(self._fd, self._look)

    @property
    def address(self) -> str:
        """Where it listens, with the port that it got, or what it is connected to."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.decode().rstrip("\0")

    @property
    def is_full(self) -> bool:
        """Whether the last `send` found no room, and there has been none since."""
        return self._is_full

    def send(self, message: bytes, attachments: Attachments = ()) -> bool:
        """False if there is no room, or it is closed: the message is still the caller's."""
        if self._is_full or self._socket.closed:
            return False
        try:
            if attachments:
                self._socket.send_multipart([message, *attachments], zmq.NOBLOCK, copy=False)
            else:
                self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            self._is_full = True
        self._look_again()  # sending may have swallowed the news that something has come
        return not self._is_full

    def close(self) -> None:
        """What was not read by the other end is lost. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()

    @property
    def _events(self) -> int:
        return int(self._socket.get(zmq.EVENTS))

    def _look(self) -> None:
        self._is_due = False
        try:
            self._read()
            if self._is_full and not self._socket.closed and self._events & zmq.POLLOUT:
                self._is_full = False
                self._on_room()
        finally:
            self._look_again()  # whatever a message led to

    def _read(self) -> None:
        for _ in range(MAX_AT_ONCE):
            if self._socket.closed:
                return
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            attached: list[Any] = []
            while self._socket.get(zmq.RCVMORE):  # all parts of a message are there, or none
                attached.append(self._socket.recv(zmq.NOBLOCK, copy=False).buffer)
            self._on_message(message, attached)

    def _look_again(self) -> None:
        if self._is_due or self._socket.closed:
            return
        wanted = zmq.POLLIN | zmq.POLLOUT if self._is_full else zmq.POLLIN
        if self._events & wanted:
            self._is_due = True
            self._loop.call_soon(self._look)


def _paired(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    listens: bool,
    prepare: Callable[[zmq.Socket[bytes]], None],
) -> zmq.Socket[bytes]:
    pair = context.socket(zmq.PAIR)
    try:
        pair.set(zmq.LINGER, 0)
        pair.set(zmq.SNDHWM, MAX_QUEUED)
        pair.set(zmq.RCVHWM, MAX_QUEUED)
        prepare(pair)
        (pair.bind if listens else pair.connect)(address)
    except BaseException:
        pair.close()  # the context waits for it at its end
        raise
    return pair


#: Makes a line, of what is to be done with messages and with room for them.
MakeLine = Callable[[OnMessage, Callable[[], None]], Line]


class Calls:
    """Questions to the other end that are not answered yet, by number."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, asyncio.Future[bytes]] = {}

    def number(self) -> int:
        """A number for a question that needs no answer."""
        self._last += 1
        return self._last

    def begin(self) -> tuple[int, "asyncio.Future[bytes]"]:
        """A number, and what the answer will be, or an error."""
        number = self.number()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        future.add_done_callback(lambda _: self._open.pop(number, None))
        return number, future

    def is_open(self, number: int) -> bool:
        """Whether a caller still waits for the answer."""
        return number in self._open and not self._open[number].done()

    def settle(self, number: int, answer: bytes, error: Exception | None) -> None:
        """The answer has come; if its caller waits no more, nothing happens."""
        if self.is_open(number):
            if error is None:
                self._open[number].set_result(answer)
            else:
                self._open[number].set_exception(error)

    def fail(self, error: Exception) -> None:
        """No answer will come any more."""
        for number in list(self._open):
            self.settle(number, b"", error)
