"""What crosses between a worker and the engine's process, as MessagePack over a ZeroMQ pair.

One end of the connection lives on the event loop of each process.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import msgspec
import zmq

from aioserve import errors
from aioserve.config import EngineConfig
from aioserve.engine.metrics import Histogram
from aioserve.engine.operations import EngineCommand, SetLogLevel
from aioserve.engine.operations.command import AdapterPaths, Answer, Command, Counted, commands_of
from aioserve.engine.stream import Origin
from aioserve.errors import AioserveError, EngineOverloadedError, RequestError
from aioserve.outputs import EngineCoreOutput
from aioserve.request import RequestSpec
from aioserve.runner.interface import RunnerInfo
from aioserve.server.access.keys import Claim, Key
from aioserve.server.running import Kept

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
    """A line between two processes, to be used, and closed, on the loop on which it was made."""

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
        """The address where it listens, with the port that it got, or that it is connected to."""
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
        """Close the line; what the other end has not read is lost. Idempotent."""
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
        """Return a number for a question that needs no answer."""
        self._last += 1
        return self._last

    def begin(self) -> tuple[int, "asyncio.Future[bytes]"]:
        """Return a number, and what the answer will be, or an error."""
        number = self.number()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        future.add_done_callback(lambda _: self._open.pop(number, None))
        return number, future

    def is_open(self, number: int) -> bool:
        """Return whether a caller still waits for the answer."""
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


# What crosses between a worker and the engine's process, as MessagePack. Requests and outputs are
# the structs that the engine has anyway. Knows nothing about sockets.


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """A worker's first message. Its form never changes: any version can read any other's."""

    version: str


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """The facts that a worker must know to serve."""

    config: EngineConfig  # what the settings amount to
    client_index: int
    started_at: int
    max_model_len: int
    runner_info: RunnerInfo
    adapters: dict[str, Path]
    keys: list[Key]


class Greeting(msgspec.Struct, array_like=True, frozen=True):
    """The engine's first message. Its form never changes, either."""

    refusal: str  # why the worker has to end; empty: it is welcome
    welcome: msgspec.Raw


# Of the server, to be answered in the engine's process: what any worker stores, all can find.


class HostCommand(Command[Answer], frozen=True):
    """A command that the process of the engine answers, for all workers."""


class KeepResponse(HostCommand[None], frozen=True):
    """Keep a response for all workers, as `ResponseStore.put` does."""

    response_id: str
    kept: Kept


class FindResponse(HostCommand[Kept | None], frozen=True):
    """Find a response of any worker, as `ResponseStore.get` does."""

    response_id: str


class ForgetResponse(HostCommand[bool], frozen=True):
    """Delete a response of any worker, as `ResponseStore.forget` does."""

    response_id: str


# What requests of a key may have is counted for all workers together.


class EnterAccount(HostCommand[None], frozen=True):
    """A call of `Accounts.enter`, until it is left, or the worker has ended."""

    lease: int  # a number that the worker uses once
    key_name: str
    claim: Claim


class EnterQueue(HostCommand[None], frozen=True):
    """A request whose images are being brought counts as a waiting one, until it is left, or the
    worker has ended. Raises `EngineOverloadedError`.
    """

    lease: int  # a number that the worker uses once


class EndLease(HostCommand[None], frozen=True):
    """Leave what was entered under this number; nothing happens if nothing was."""

    lease: int


# Asked of workers.


class WorkerCommand(Command[Answer], frozen=True):
    """A command that the engine's process gives and a worker runs."""


class AbortHere(WorkerCommand[bool], frozen=True):
    """Abort a request of this worker, as another worker's `AbortElsewhere` asks."""

    request_id: str
    reach: str


class Report(msgspec.Struct, array_like=True, frozen=True):
    """A worker's delays, refusals and counts, for metrics."""

    loop_lag: float  # seconds, the worst of the last minute
    refusals: list[tuple[str, str, int]]  # by reason and key, since it lives
    loop_delay: Histogram  # seconds, while it was busy
    counted: list[Counted]


class KnowKeys(WorkerCommand[None], frozen=True):
    """Take these API keys instead of the ones known so far."""

    keys: list[Key]


class MakeReport(WorkerCommand[Report], frozen=True):
    """Send a `Report`, for the metrics of the whole server."""


class KnowAdapters(WorkerCommand[None], frozen=True):
    """Take these LoRA adapters instead of the ones known so far."""

    adapters: AdapterPaths


# From worker to engine.


class ArrayForm(msgspec.Struct, array_like=True, frozen=True):
    """An array of an encoder input, whose memory is attached to the message."""

    input_index: int  # among the request's
    name: str
    dtype: str  # as numpy spells it
    shape: tuple[int, ...]


class Add(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A request, to be answered with a `Reply`."""

    call_id: int
    spec: bytes  # a `RequestSpec`, of all its samples, without arrays
    is_json: bool  # else MessagePack, which knows no integers of more than 64 bits
    adapter: str
    timeout: float | None
    origin: Origin
    arrays: list[ArrayForm] = []  # as many as are attached
    hands_over: bool = False  # its end is told when other engines find its KV blocks


class Drop(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Abort a request that has no reader any more: its output is not sent."""

    request_id: str


class Abort(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """End it; what it has comes as its last output."""

    request_id: str


class Stopped(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A stop string was found in the last of `num_tokens` tokens of each sample, by its id."""

    num_tokens: dict[str, int]


class Prepared(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The worker could listen now, and waits to be told."""


class Listening(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The worker takes connections from now on."""


# Both ways.


class Ask(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A command, to be answered with a `Reply`."""

    call_id: int
    command: msgspec.Raw


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error, as far as it crosses: what it is, and what it says."""

    kind: str  # the name of its class
    message: str
    param: str | None = None
    retry_after: float = 1.0

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the error to send; any not raised on purpose by type alone: its text may quote
        all.
        """
        if not isinstance(error, AioserveError):
            return cls("", f"internal error ({type(error).__name__})")
        return cls(
            type(error).__name__,
            str(error).encode(errors="backslashreplace").decode(),  # it may quote anything
            error.param if isinstance(error, RequestError) else None,
            error.retry_after if isinstance(error, EngineOverloadedError) else 1.0,
        )

    def to_error(self) -> Exception:
        """Return the error as it was raised; one of an unknown class becomes a `RuntimeError`."""
        cls = _ERRORS.get(self.kind)
        if cls is None:
            return RuntimeError(self.message)
        if issubclass(cls, RequestError):
            return cls(self.message, self.param)
        if issubclass(cls, EngineOverloadedError):
            return cls(self.message, self.retry_after)
        return cls(self.message)


_ERRORS: dict[str, type[AioserveError]] = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, AioserveError)
}


class Reply(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The result of a call: an answer, or the failure."""

    call_id: int
    answer: msgspec.Raw
    failure: Failure | None = None


# From engine to worker.


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Samples that get an error instead of more tokens."""

    request_ids: list[str]
    failure: Failure


class Listen(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Take connections: all workers can, and nothing else takes any more."""


class Quit(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The order to a worker to close its connections and end."""

    exit_code: int


MessageToWorker = Reply | Ask | Listen | Quit
MessageToEngine = Add | Drop | Abort | Stopped | Prepared | Listening | Ask | Reply


class ToEngine(msgspec.Struct, array_like=True, frozen=True):
    """All that a worker has to say now."""

    messages: list[MessageToEngine]


class ToWorker(msgspec.Struct, array_like=True, frozen=True):
    """All that the engine has to say to one worker now, in the order in which it is to be read:
    a request is accepted before it has outputs, and fails after them.
    """

    messages: list[MessageToWorker]
    outputs: list[EngineCoreOutput]  # of a step
    num_cached_tokens: dict[str, int]  # by sample, with its first output, if there are any
    since_first_token: dict[str, float]  # seconds by sample, at the end of one told nothing before
    vectors: dict[str, bytes]  # of prompts that were pooled, float32, little endian
    failed: list[Failed]


#: What a worker may ask of the engine's process, and what that may ask of a worker.
TO_HOST: Any = reduce(or_, commands_of(EngineCommand) + commands_of(HostCommand))
TO_WORKER: Any = reduce(or_, (*commands_of(WorkerCommand), SetLogLevel))


def _encode_other(value: Any) -> Any:
    """Encode a path as text; no other type is sent."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no message has a {type(value).__name__}")


def _decode_other(kind: type, value: Any) -> Any:
    return kind(value)


encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of what `encoder` made of a `kind`."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_other)


NO_ANSWER = msgspec.Raw(encoder.encode(None))
_spec_decoder = msgspec.msgpack.Decoder(RequestSpec)


def encode_spec(spec: RequestSpec) -> tuple[bytes, bool]:
    """Return the spec as `Add` has it: the bytes, and whether they are JSON."""
    try:
        return encoder.encode(spec), False
    except OverflowError:  # JSON clients may write any integers, in a schema for example
        return msgspec.json.encode(spec), True


def arrays_of(spec: RequestSpec) -> tuple[list[ArrayForm], list[Any]]:
    """Return what its encoder inputs hold: forms, and the memory for a `Line`."""
    forms, memory = [], []
    for i, item in enumerate(spec.encoder_inputs):
        for name, array in (item.arrays or {}).items():
            forms.append(ArrayForm(i, name, array.dtype.str, array.shape))
            memory.append(array.data if array.flags.c_contiguous else array.tobytes())
    return forms, memory


def decode_spec(add: Add, attached: Attachments = ()) -> RequestSpec:
    """Return what was asked for. Arrays are `attached`, and stay in that memory."""
    if add.is_json:
        spec = msgspec.json.decode(add.spec, type=RequestSpec)
    else:
        spec = _spec_decoder.decode(add.spec)
    if not add.arrays:
        return spec
    import numpy as np

    arrays: list[dict[str, Any]] = [{} for _ in spec.encoder_inputs]
    for form, memory in zip(add.arrays, attached, strict=True):
        array = np.frombuffer(memory, form.dtype).reshape(form.shape)
        arrays[form.input_index][form.name] = array
    items = [
        msgspec.structs.replace(item, arrays=own or None)
        for item, own in zip(spec.encoder_inputs, arrays, strict=True)
    ]
    return msgspec.structs.replace(spec, encoder_inputs=items)
