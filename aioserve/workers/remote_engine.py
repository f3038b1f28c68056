"""An engine in another process, as its front half in a worker: what the server asks of an engine.

Tokenizes, detokenizes and finds stop strings here; all else is the engine's. Knows no HTTP.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, NamedTuple, cast

import msgspec
import zmq

from aioserve.engine import RequestStream
from aioserve.engine.client import EngineClient, KnownAdapters
from aioserve.engine.clock import Clock, clock_of
from aioserve.engine.input_processor import InputProcessor, PoolingValidator
from aioserve.engine.metric_families import Histogram
from aioserve.engine.output_processor import OutputProcessor
from aioserve.engine.stream import Claims, Samples
from aioserve.engine.watchdog import LoopMonitor
from aioserve.errors import EngineDeadError
from aioserve.model_info import ModelInfo
from aioserve.operations import AbortElsewhere, EngineCommand, HealthCheck, SetLogLevel
from aioserve.operations.command import Answer, Command, Counted, Health
from aioserve.request import Request, RequestSpec
from aioserve.server.access.access import Access
from aioserve.server.access.keys import ONE, Claim, Leave
from aioserve.server.running import Kept
from aioserve.support.arguments import EXIT_FAILED
from aioserve.support.logs import set_log_level
from aioserve.workers.engine_end import EngineEnd
from aioserve.workers.line import Line, OnMessage
from aioserve.workers.messages import (
    NO_ANSWER,
    TO_WORKER,
    Abort,
    AbortHere,
    Ask,
    Drop,
    EndLease,
    EnterAccount,
    EnterQueue,
    Failure,
    FindResponse,
    ForgetResponse,
    HostCommand,
    KeepResponse,
    KnowAdapters,
    KnowKeys,
    Listen,
    Listening,
    MakeReport,
    Prepared,
    Quit,
    Reply,
    Report,
    ToWorker,
    Welcome,
    decoder,
    encoder,
)
from aioserve.workers.remote_delivery import RemoteDelivery

logger = logging.getLogger(__name__)

# Seconds after which an engine that has not answered counts as not well. A guess.
HEALTH_SECONDS = 5.0

_command = decoder(TO_WORKER)


class RemoteParts(NamedTuple):
    """What the front half is made of."""

    input_processor: InputProcessor
    pooling: PoolingValidator
    delivery: RemoteDelivery
    clock: Clock

    @property
    def output_processor(self) -> OutputProcessor:
        """The readers of this worker."""
        return self.delivery.processor

    @property
    def claims(self) -> Claims:
        """The ids that requests of this worker have taken."""
        return self.output_processor.claims


class RemoteEngine(EngineClient):
    """Made, started and closed in one event loop. It dies with its engine, and for good."""

    def __init__(self, address: str) -> None:
        """Nothing is known yet: `start` learns it."""
        #: What ends one request, or a response of several, of this worker.
        self.abort_here: Callable[[str, str], bool] = lambda given_id, reach: (
            not reach and self.abort(given_id)
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
        """As `ask`, of what needs no answer: nothing happens if the engine has died."""
        if self._error is None:
            self._end.say(Ask(self._calls.number(), msgspec.Raw(encoder.encode(command))))

    async def turn(self) -> None:
        """Return when we may take connections: we could now."""
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
        self._pulse.stop()
        self._end.line.close()
        self._context.term()
        if self._parts is not None:
            self._parts.input_processor.close()

    def abort(self, request_id: str) -> bool:
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
        """None if it was never stored, or is forgotten."""
        return await self._engine.ask(FindResponse(response_id))

    async def put(self, response_id: str, kept: Kept) -> None:
        """Keep it; those that were not asked for the longest are forgotten for it."""
        await self._engine.ask(KeepResponse(response_id, kept))

    async def forget(self, response_id: str) -> bool:
        """Delete the response of that id; False if it is not stored."""
        return await self._engine.ask(ForgetResponse(response_id))
