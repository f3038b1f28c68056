"""The near end of a line to an engine in another process: requests out, answers and outputs in.

Knows neither which requests there are nor what becomes of outputs.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aioserve.engine.stream import Origin
from aioserve.errors import ConfigError
from aioserve.request import RequestSpec
from aioserve.support.version import __version__
from aioserve.workers.line import Attachments, Calls, MakeLine
from aioserve.workers.messages import (
    Add,
    Greeting,
    Hello,
    MessageToEngine,
    Reply,
    ToEngine,
    ToWorker,
    arrays_of,
    decoder,
    encode_spec,
    encoder,
)

_greeting = decoder(Greeting)
_to_worker = decoder(ToWorker)


class EngineEnd:
    """To be used, and closed, on the loop on which it was made."""

    def __init__(self, make_line: MakeLine, on_fault: Callable[[Exception], None]) -> None:
        """`on_fault` gets what was raised when a message is lost: a client that waits for what it
        held would wait for ever. Raises what `make_line` does.
        """
        self.calls = Calls()
        self._on_fault = on_fault
        self._take: Callable[[ToWorker], None] | None = None
        self._greeting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._early: list[bytes] = []  # what came right after the greeting
        self._accepting: dict[int, Callable[[], None]] = {}  # by number of a call
        self._unsent: list[MessageToEngine] = []
        self._unsent_arrays: list[Any] = []  # theirs, in their order
        self._is_sending_soon = False
        self.line = make_line(self._on_message, self._send)

    async def greet(self, welcome_type: Any) -> Any:
        """Greet the engine; returns what it welcomes us with. Raises `ConfigError` if it refuses
        us.
        """
        self.line.send(encoder.encode(Hello(__version__)))
        greeting: Greeting = _greeting.decode(await self._greeting)
        if greeting.refusal:
            raise ConfigError(f"the engine refuses this worker: {greeting.refusal}")
        return decoder(welcome_type).decode(greeting.welcome)

    def open(self, take: Callable[[ToWorker], None]) -> None:
        """From now on `take` gets what the engine says, answers apart; first what it has said."""
        self._take = take
        for message in self._early:
            self._on_message(message)
        self._early = []

    def add(
        self,
        spec: RequestSpec,
        adapter: str,
        seconds: float | None,
        origin: Origin,
        accept: Callable[[], None],
        *,
        hands_over: bool = False,
    ) -> "asyncio.Future[bytes]":
        """Send a request. The future is done when it is accepted, or has the error; `accept` is
        called before any output of it is taken. `hands_over`: another engine will go on with it.
        """
        forms, arrays = arrays_of(spec)
        number, future = self.calls.begin()
        # Not before: until then there may be outputs of one that had its id, and was dropped.
        self._accepting[number] = accept
        future.add_done_callback(lambda _: self._accepting.pop(number))
        sent = encode_spec(spec.without_arrays())  # these are attached
        self.say(Add(number, *sent, adapter, seconds, origin, forms, hands_over), arrays)
        return future

    def say(self, message: MessageToEngine, arrays: Attachments = ()) -> None:
        """What comes in one turn of the loop goes in one message."""
        self._unsent.append(message)
        self._unsent_arrays += arrays
        if not self._is_sending_soon:
            self._is_sending_soon = True
            asyncio.get_running_loop().call_soon(self._send)

    def fail(self, error: Exception) -> None:
        """The engine will say nothing more, neither to a call nor to a greeting."""
        self.calls.fail(error)
        if not self._greeting.done():
            self._greeting.set_exception(error)
            self._greeting.exception()  # seen, whether or not it is awaited

    def _send(self) -> None:
        self._is_sending_soon = False
        try:
            message = encoder.encode(ToEngine(self._unsent)) if self._unsent else b""
        except Exception as error:  # it would be in the way of all that comes after it
            self._unsent, self._unsent_arrays = [], []
            self._on_fault(error)
            return
        if message and self.line.send(message, self._unsent_arrays):
            self._unsent, self._unsent_arrays = [], []

    def _on_message(self, message: bytes, _: Attachments = ()) -> None:
        if not self._greeting.done():
            self._greeting.set_result(message)
            return
        if self._take is None:
            self._early.append(message)
            return
        try:
            said: ToWorker = _to_worker.decode(message)
            for one in said.messages:
                if isinstance(one, Reply):
                    self._settle(one)
            self._take(said)
        except Exception as error:  # as in one process: to go on without it may tell nonsense
            self._on_fault(error)

    def _settle(self, reply: Reply) -> None:
        accept = self._accepting.get(reply.call_id)
        if accept is not None and reply.failure is None and self.calls.is_open(reply.call_id):
            accept()
        error = None if reply.failure is None else reply.failure.to_error()
        self.calls.settle(reply.call_id, bytes(reply.answer), error)
