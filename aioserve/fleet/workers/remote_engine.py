"""An engine in another process, as its front half in a worker: what the server asks of one.

Requests go out over a line; answers and outputs come in, and are made into text for the readers of
this process.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import zmq

from aioserve.engine import RequestStream
from aioserve.engine.client import EngineClient
from aioserve.engine.clock import Clock, clock_of
from aioserve.engine.input_processor import InputProcessor, PoolingValidator
from aioserve.engine.metrics import Histogram
from aioserve.engine.operations import AbortElsewhere, EngineCommand, HealthCheck, SetLogLevel
from aioserve.engine.operations.command import Answer, Command, Counted, Health
from aioserve.engine.output_processor import OutputProcessor
from aioserve.engine.stream import Claims, Origin, Samples, SampleState
from aioserve.engine.watchdog import LoopMonitor
from aioserve.errors import ConfigError, EngineDeadError, UnknownModelError
from aioserve.fleet.workers.messages import (
    NO_ANSWER,
    TO_WORKER,
    Abort,
    AbortHere,
    Add,
    Ask,
    Attachments,
    Calls,
    Drop,
    EndLease,
    EnterAccount,
    EnterQueue,
    Failure,
    FindResponse,
    ForgetResponse,
    Greeting,
    Hello,
    HostCommand,
    KeepResponse,
    KnowAdapters,
    KnowKeys,
    Line,
    Listen,
    Listening,
    MakeLine,
    MakeReport,
    MessageToEngine,
    OnMessage,
    Prepared,
    Quit,
    Reply,
    Report,
    Stopped,
    ToEngine,
    ToWorker,
    Welcome,
    arrays_of,
    decoder,
    encode_spec,
    encoder,
)
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import EngineCoreOutput, FinishReason
from aioserve.request import Request, RequestSpec
from aioserve.server.access.access import Access
from aioserve.server.access.keys import ONE, Claim, Leave
from aioserve.server.running import Kept
from aioserve.support import __version__
from aioserve.support.arguments import EXIT_FAILED
from aioserve.support.logs import set_log_level

_greeting = decoder(Greeting)
_to_worker = decoder(ToWorker)


class EngineEnd:
    """The worker's end of the line to an engine, to be used, and closed, on the loop on which it
    was made.
    """

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
        sent = encode_spec(spec.without_arrays())  # arrays are attached
        self.say(Add(number, *sent, adapter, seconds, origin, forms, hands_over), arrays)
        return future

    def say(self, message: MessageToEngine, arrays: Attachments = ()) -> None:
        """Send what comes in one turn of the loop in one message."""
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


# Outputs of an engine in another process, made into text for the readers of this one. Knows no
# line: what a stop string has ended is returned, for the engine to be told.


class _StopCounts:
    """Counts nothing but the tokens of those that a stop string has ended: the engine does."""

    def __init__(self) -> None:
        self.num_generation_tokens = 0
        self.num_tokens: dict[str, int] = {}

    def on_prompt_computed(self, state: SampleState, now: float) -> None:
        pass

    def on_next_tokens(self, seconds: float, num_requests: int) -> None:
        pass

    def on_finished(
        self, state: SampleState, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        if reason is FinishReason.STOP:
            self.num_tokens[state.request.request_id] = num_output_tokens


class RemoteDelivery:
    """All requests that have a reader here."""

    def __init__(self, tokenizer: object, clock: Clock) -> None:
        self._counts = _StopCounts()
        self._clock = clock
        self.processor = OutputProcessor(tokenizer, self._counts, clock=clock, may_wait=False)

    def deliver(self, said: ToWorker) -> Stopped | None:
        """Deliver outputs to their readers; returns what the engine has to be told."""
        now = self._clock()
        for request_id, num_tokens in said.num_cached_tokens.items():
            self.processor.set_num_cached_tokens(request_id, num_tokens)
        for request_id, seconds in said.since_first_token.items():
            self.processor.set_first_token_time(request_id, now - seconds)
        outputs = said.outputs
        if said.vectors:
            outputs = [_with_vector(output, said.vectors) for output in outputs]
        told = None
        if stopped := self.processor.process_outputs(outputs, now):
            counted = self._counts.num_tokens
            told = Stopped({sample_id: counted[sample_id] for sample_id in stopped})
        self._counts.num_tokens.clear()
        return told


def _with_vector(output: EngineCoreOutput, vectors: Mapping[str, bytes]) -> EngineCoreOutput:
    import numpy as np

    if output.request_id not in vectors:
        return output
    vector = np.frombuffer(vectors[output.request_id], dtype="<f4").astype(np.float32)
    return msgspec.structs.replace(output, embedding=vector)


# An engine in another process, as its front half in a worker: what the server asks of an engine.
# Tokenizes, detokenizes and finds stop strings here; all else is the engine's. Knows no HTTP.


logger = logging.getLogger(__name__)

# Seconds after which an engine that has not answered counts as not well. A guess.
HEALTH_SECONDS = 5.0

_command = decoder(TO_WORKER)


class KnownAdapters:
    """Adapters of an engine in another process, as last reported."""

    def __init__(self, models: Sequence[str], paths: Mapping[str, Path]) -> None:
        """`models` are the names of the base model."""
        self._models = models
        self.paths = paths

    def check_name(self, name: str) -> None:
        """Raises `UnknownModelError` if it is neither the model's nor an adapter's."""
        if name not in self._models and name not in self.paths:
            raise UnknownModelError.of(name, (*self._models, *self.paths))


class RemoteParts(NamedTuple):
    """The parts of the front half."""

    input_processor: InputProcessor
    pooling: PoolingValidator
    delivery: RemoteDelivery
    clock: Clock

    @property
    def output_processor(self) -> OutputProcessor:
        """The readers of this worker's requests."""
        return self.delivery.processor

    @property
    def claims(self) -> Claims:
        """The ids that requests of this worker have taken."""
        return self.output_processor.claims


class RemoteEngine(EngineClient):
    """An engine in another process, to be made, started and closed in one event loop. It dies with
    its engine, and for good.
    """

    def __init__(self, address: str) -> None:
        """Nothing is known yet: `start` learns it."""
        #: What ends one request, or a response of several, of this worker.
        self.abort_here: Callable[[str, str], bool] = lambda given_id, reach: (
            not reach and self.abort_now(given_id)
        )
        #: Which keys are let in; known after start.
        self.access: Access
        #: Set when we have to end: our exit code.
        self.is_over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._may_listen = asyncio.Event()
        self._adapters: KnownAdapters | None = None
        self._parts: RemoteParts | None = None
        self._error: EngineDeadError | None = None
        #: What the application of this process has counted.
        self.tell_counted: Callable[[], list[Counted]] = list
        self._loop_delay = Histogram()
        self._pulse = LoopMonitor(
            lambda: self._parts is not None and len(self._parts.output_processor) > 0,
            self._loop_delay.observe,
        )
        self._last_lease = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

        def make_line(on_message: OnMessage, on_room: Callable[[], None]) -> Line:
            return Line(
                self._context, address, listens=False, on_message=on_message, on_room=on_room
            )

        self._end = EngineEnd(make_line, self._fail)
        self._calls = self._end.calls

    @property
    def adapters(self) -> KnownAdapters:
        if self._adapters is None:
            raise EngineDeadError("the engine has not been started")
        return self._adapters

    async def start(self) -> None:
        """Greet the engine, and learn what to serve. Raises `ConfigError` if it refuses us, or the
        tokenizer cannot be read here.
        """
        welcome: Welcome = await self._end.greet(Welcome)
        self.config = config = welcome.config
        self.model_info = info = ModelInfo(config.model)
        self.started_at = welcome.started_at
        self.max_model_len = welcome.max_model_len
        self._adapters = KnownAdapters(config.model.served_names, welcome.adapters)
        self.access = Access(config.access, welcome.keys, RemoteAccounts(self))
        clock = clock_of(asyncio.get_running_loop())
        self._parts = RemoteParts(
            InputProcessor(
                info,
                welcome.max_model_len,
                # Of workers with the same seed, all would draw the same.
                config.runner.seed + (welcome.client_index << 32),
                runner_info=welcome.runner_info,
            ),
            PoolingValidator(info, welcome.runner_info),
            RemoteDelivery(info.tokenizer, clock),
            clock,
        )
        self._end.open(self._take)

    def tell(self, command: HostCommand[None]) -> None:
        """Send a command that needs no answer; nothing happens if the engine has died."""
        if self._error is None:
            self._end.say(Ask(self._calls.number(), msgspec.Raw(encoder.encode(command))))

    async def turn(self) -> None:
        """Return at once: this worker can take connections now."""
        self._end.say(Prepared())
        await self._may_listen.wait()

    def begin(self) -> None:
        """We take connections from now on."""
        self._end.say(Listening())

    def die(self, why: str) -> None:
        """Fail all requests and calls of this worker: the engine has died."""
        self._error = EngineDeadError(why)
        self._calls.fail(self._error)
        if self._parts is not None:
            self._parts.output_processor.fail_requests(None, self._error, self._parts.clock())

    def close(self) -> None:
        """Nothing is sent or received any more."""
        self._close_chat_format()
        self._pulse.stop()
        self._end.line.close()
        self._context.term()
        if self._parts is not None:
            self._parts.input_processor.close()

    def abort_now(self, request_id: str) -> bool:
        if self._parts is None or self._error is not None:
            return False
        samples = self._parts.claims.samples_of(request_id)
        if samples is not None and samples.is_aborted and not samples.is_arriving:
            return False  # its end is on the way
        return self._abort_if_here(request_id, self._parts.claims)

    async def ask(self, command: EngineCommand[Answer] | HostCommand[Answer]) -> Answer:
        asked: Command[Any] = command
        match asked:
            case HealthCheck():
                return cast(Answer, await self._ask_health(asked))
            case AbortElsewhere() if self._error is not None:
                return cast(Answer, False)
        return await self._ask(command)

    async def _ask_health(self, command: HealthCheck) -> Health:
        if self._error is not None:
            return Health("dead", str(self._error))
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return await self._ask(command)
        except TimeoutError:
            return Health("silent", f"the engine has not answered in {HEALTH_SECONDS:g} s")

    def arriving(self) -> AbstractAsyncContextManager[object]:
        return self.leased(EnterQueue)

    @asynccontextmanager
    async def leased(self, enter: Callable[[int], HostCommand[None]]) -> AsyncIterator[Leave]:
        """Inside the block the engine's process counts what `enter` asks of it, for the number that
        it is given. The value ends that early. Raises what the engine raises.
        """
        self._last_lease = lease = self._last_lease + 1
        has_left = False

        async def leave() -> None:
            nonlocal has_left
            if not has_left:
                has_left = True
                with suppress(EngineDeadError):  # it counts nothing any more
                    await self.ask(EndLease(lease))

        try:
            await self.ask(enter(lease))
            yield leave
        except (asyncio.CancelledError, GeneratorExit):  # the client has gone: it hears of no end
            self.tell(EndLease(lease))
            raise
        except BaseException:
            await leave()
            raise
        # Another worker may get the client's next request, and what that asks of the engine could
        # overtake what is only told.
        await leave()

    async def _ask(self, command: Command[Answer]) -> Answer:
        self._alive()
        number, future = self._calls.begin()
        self._end.say(Ask(number, msgspec.Raw(encoder.encode(command))))
        try:
            answer: Answer = decoder(command.answer_type).decode(await future)
        finally:
            # An error refers to this frame, and the future to the error: only the cyclic garbage
            # collector would free what the frames above it hold, images among it.
            del future
        return answer

    def _alive(self) -> RemoteParts:
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error
        if self._parts is None:
            raise EngineDeadError("the engine has not been started")
        return self._parts

    async def _submit(
        self,
        spec: RequestSpec,
        samples: Samples,
        stream: RequestStream,
        adapter: str,
        seconds: float | None,
    ) -> None:
        parts = self._alive()
        requests = [Request(own) for own in samples.specs(spec.without_arrays())]

        def accept() -> None:
            for index, request in enumerate(requests):
                parts.output_processor.add_request(request, samples, index, stream)
            self._pulse.start()

        future = self._end.add(spec, adapter, seconds, samples.origin, accept)
        samples.let_go = lambda: self._end.say(Abort(samples.request_id))
        try:
            await future
        finally:
            del future  # as in `_ask`
            samples.let_go = None

    def _drop(self, samples: Samples) -> None:
        parts = self._parts
        assert parts is not None
        if parts.claims.samples_of(samples.request_id) is not samples:
            return  # it has ended
        parts.output_processor.drop(samples, parts.clock())
        if self._error is None:
            self._end.say(Drop(samples.request_id))

    def _abort(self, samples: Samples) -> bool:
        samples.is_aborted = True
        self._end.say(Abort(samples.request_id))
        return True

    def _fail(self, error: Exception) -> None:
        """A message is lost: a client that waits for what it held would wait for ever."""
        logger.critical("this worker has failed", exc_info=error)
        self.die(f"this worker has failed ({type(error).__name__})")
        self._finish(EXIT_FAILED)

    def _take(self, said: ToWorker) -> None:
        parts = self._parts
        assert parts is not None
        for one in said.messages:
            match one:
                case Ask(call_id, command):
                    self._answer(call_id, bytes(command))
                case Listen():
                    self._may_listen.set()
                case Quit(exit_code):
                    self._finish(exit_code)
        if said.outputs and (stopped := parts.delivery.deliver(said)) is not None:
            self._end.say(stopped)
        for failed in said.failed:
            error = failed.failure.to_error()
            parts.output_processor.fail_requests(failed.request_ids, error, parts.clock())

    def _finish(self, exit_code: int) -> None:
        if not self.is_over.done():
            self.is_over.set_result(exit_code)

    def _answer(self, call_id: int, encoded: bytes) -> None:
        answer: Any = None
        failure = None
        try:
            match _command.decode(encoded):
                case AbortHere(request_id, reach):
                    answer = self.abort_here(request_id, reach)
                case MakeReport():
                    refused = [(*by, count) for by, count in self.access.refusals.items()]
                    answer = Report(
                        self._pulse.worst(), refused, self._loop_delay, self.tell_counted()
                    )
                case KnowAdapters(adapters):
                    self.adapters.paths = adapters.paths
                case SetLogLevel(level):
                    set_log_level(level)
                case KnowKeys(keys):
                    self.access.take(keys)
        except Exception as error:
            logger.exception("a command of the engine could not be answered")
            failure = Failure.of(error)
        told = NO_ANSWER if failure else msgspec.Raw(encoder.encode(answer))
        self._end.say(Reply(call_id, told, failure))


class RemoteAccounts:
    """`Accounts`, kept by the engine's process for all workers."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def entered(self, name: str, claim: Claim = ONE) -> AbstractAsyncContextManager[Leave]:
        """Count a request of the key as running at the engine, as `Entrance` says."""
        return self._engine.leased(lambda lease: EnterAccount(lease, name, claim))


class RemoteResponses:
    """`ResponseStore`, kept by the engine's process for all workers."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    async def get(self, response_id: str) -> Kept | None:
        """Return a stored response; None if it was never stored or is forgotten."""
        return await self._engine.ask(FindResponse(response_id))

    async def put(self, response_id: str, kept: Kept) -> None:
        """Keep it; those that were not asked for the longest are forgotten for it."""
        await self._engine.ask(KeepResponse(response_id, kept))

    async def forget(self, response_id: str) -> bool:
        """Delete the response of that id; False if it is not stored."""
        return await self._engine.ask(ForgetResponse(response_id))
