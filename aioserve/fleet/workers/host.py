"""The engine's side of its workers: takes requests, sends what steps bring, answers questions.

What a worker asks for the whole server is answered here, too.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec
import zmq

from aioserve.engine import AsyncEngine
from aioserve.engine.operations import (
    AbortElsewhere,
    LoadAdapter,
    SetLogLevel,
    ShowMetrics,
    UnloadAdapter,
)
from aioserve.engine.operations.command import AdapterPaths, Command, EngineCommand
from aioserve.engine.stream import Samples, SampleState, wants_only_end
from aioserve.errors import AioserveError, EngineDeadError
from aioserve.fleet.workers.messages import (
    NO_ANSWER,
    TO_HOST,
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
    Failed,
    Failure,
    FindResponse,
    ForgetResponse,
    Greeting,
    Hello,
    KeepResponse,
    KnowAdapters,
    KnowKeys,
    Line,
    Listen,
    Listening,
    MakeLine,
    MakeReport,
    MessageToEngine,
    MessageToWorker,
    OnMessage,
    Prepared,
    Quit,
    Reply,
    Stopped,
    ToEngine,
    ToWorker,
    Welcome,
    decode_spec,
    decoder,
    encoder,
)
from aioserve.outputs import EngineCoreOutput, FinishReason
from aioserve.request import Request, RequestSpec
from aioserve.server.access.access import MainAccess, Refusals
from aioserve.server.access.keys import Claim, Key
from aioserve.server.running import ResponseStore
from aioserve.support import __version__
from aioserve.support.arguments import EXIT_FAILED

logger = logging.getLogger(__name__)

_to_engine = decoder(ToEngine)
_hello = decoder(Hello)


class Outbox:
    """The messages that a worker has not been sent yet."""

    def __init__(self) -> None:
        self.messages: list[MessageToWorker] = []
        self.outputs: list[EngineCoreOutput] = []
        self.num_cached_tokens: dict[str, int] = {}
        self.since_first_token: dict[str, float] = {}
        self.vectors: dict[str, bytes] = {}
        self.failed: list[Failed] = []

    def __bool__(self) -> bool:
        return bool(self.messages or self.outputs or self.failed)

    def encode(self) -> bytes:
        return encoder.encode(
            ToWorker(
                *(self.messages, self.outputs, self.num_cached_tokens, self.since_first_token),
                *(self.vectors, self.failed),
            )
        )

    def clear(self) -> None:
        self.messages, self.outputs, self.failed = [], [], []
        self.num_cached_tokens, self.since_first_token, self.vectors = {}, {}, {}

    def merge(self) -> None:
        """One output per sample: what waits is bounded by what the samples may have."""
        merged: dict[str, EngineCoreOutput] = {}
        for output in self.outputs:
            before = merged.get(output.request_id)
            merged[output.request_id] = output if before is None else _merge(before, output)
        self.outputs = list(merged.values())

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop unsent output of requests that are over; other requests may get their ids."""
        gone = set(request_ids)
        if self.outputs:
            self.outputs = [output for output in self.outputs if output.request_id not in gone]
        for by_id in (self.num_cached_tokens, self.since_first_token, self.vectors):
            for request_id in gone & by_id.keys():
                del by_id[request_id]
        if self.failed:
            for failed in self.failed:
                failed.request_ids[:] = [i for i in failed.request_ids if i not in gone]


def _merge(before: EngineCoreOutput, newer: EngineCoreOutput) -> EngineCoreOutput:
    logprobs = before.new_logprobs
    if newer.new_logprobs is not None:
        logprobs = (logprobs or []) + newer.new_logprobs
    return msgspec.structs.replace(
        newer,
        new_token_ids=before.new_token_ids + newer.new_token_ids,
        new_logprobs=logprobs,
        prompt_logprobs=before.prompt_logprobs or newer.prompt_logprobs,
    )


class _ForwardedState(SampleState):
    """A sample that is read in a worker."""

    __slots__ = ("_worker", "hands_over")

    is_read_here = False

    def __init__(
        self, request: Request, samples: Samples, worker: "Forwarder", *, hands_over: bool
    ) -> None:
        waits = wants_only_end(request.sampling_params)
        super().__init__(request, samples, waits_for_end=waits)
        self._worker = worker
        self.hands_over = hands_over

    def deliver(self, output: EngineCoreOutput, now: float) -> FinishReason | None:
        outbox, request = self._worker.outbox, self.request
        num_told = len(request.spec.output_token_ids)  # by the engine that had it
        if not (self.num_output_tokens or num_told) and request.num_cached_tokens:
            outbox.num_cached_tokens[request.request_id] = request.num_cached_tokens
        if self.waits_for_end:
            own = request.output_token_ids[num_told:]
            output = msgspec.structs.replace(output, new_token_ids=own)
            if self.first_token_time is not None:
                outbox.since_first_token[request.request_id] = now - self.first_token_time
        if output.embedding is not None:
            outbox.vectors[request.request_id] = output.embedding.astype("<f4").tobytes()
            output = msgspec.structs.replace(output, embedding=None)
        self.num_output_tokens += len(output.new_token_ids)
        outbox.outputs.append(output)
        if output.finish_reason is not None:
            self._worker.on_end(self.samples)
        return output.finish_reason

    def fail(self, error: BaseException) -> None:
        self._worker.outbox.failed.append(Failed([self.request.request_id], Failure.of(error)))
        self._worker.on_end(self.samples)


class Forwarder(ABC):
    """One front end in one life, from before it is connected."""

    def __init__(self, engine: AsyncEngine, name: str, make_line: MakeLine) -> None:
        """Raises what `make_line` does, and `EngineDeadError` where there is no engine any more."""
        self.name = name
        self.outbox = Outbox()
        self._engine = engine
        self._client_index = engine.internals.connect(self._send)
        self._is_welcome = False
        self._is_sending_soon = False
        self._calls = Calls()
        self._samples: dict[str, Samples] = {}  # of requests that live, by their ids
        self._adding: dict[str, asyncio.Task[None]] = {}
        self._claiming: set[str] = set()  # ids of requests that are being accepted
        try:
            self._line = make_line(self._on_message, self._send)
        except OSError:
            engine.internals.disconnect(self._client_index)
            raise

    @property
    def num_requests(self) -> int:
        """Requests that live, those that are being accepted included."""
        return len(self._samples) + len(self._adding)

    def close(self) -> int:
        """Drop the requests of a worker that is gone. Returns how many there were."""
        self._line.close()
        self._engine.internals.disconnect(self._client_index)
        num_requests = self.num_requests
        for task in self._adding.values():
            task.cancel()
        self._calls.fail(EngineDeadError(f"{self.name} has ended"))
        for samples in self._samples.values():
            self._engine.internals.drop(samples)
        self._samples.clear()
        return num_requests

    def on_end(self, samples: Samples) -> None:
        """A sample has ended, and has not been taken off the list of those that live."""
        if samples.num_live == 1:
            self._samples.pop(samples.request_id, None)
        self._send_soon()

    @abstractmethod
    def welcome(self) -> Any:
        """Return what a front end is told that has said hello: of the type that it expects."""

    @abstractmethod
    def refuse(self) -> None:
        """End a front end whose message cannot be read: it would wait for an answer for ever."""

    def received(self, spec: RequestSpec, add: Add) -> RequestSpec:
        """Return the request as the engine is to have it."""
        return msgspec.structs.replace(spec, client_index=self._client_index)

    @abstractmethod
    def take(self, said: MessageToEngine) -> None:
        """Take a message that is not about a request."""

    def _on_message(self, message: bytes, attached: Attachments) -> None:
        if not self._is_welcome:
            self._greet(_hello.decode(message))
            return
        arrays = iter(attached)
        try:
            messages = _to_engine.decode(message).messages
        except Exception:
            logger.critical("what %s says cannot be read: it is ended", self.name, exc_info=True)
            self.refuse()
            return
        for said in messages:
            own = list(islice(arrays, len(said.arrays))) if isinstance(said, Add) else ()
            try:
                self._take(said, own)
            except Exception:  # what comes after it is for others
                logger.exception("a message of %s failed", self.name)

    def _take(self, said: MessageToEngine, attached: Attachments) -> None:
        match said:
            case Add():
                self._add(said, attached)
            case Drop(request_id):
                self._drop(request_id)
            case Stopped(num_tokens):
                self._stop(num_tokens)
            case Abort(request_id):
                if request_id in self._adding:  # by the time of the call, that has begun
                    asyncio.get_running_loop().call_soon(self._abort, request_id)
                else:
                    self._abort(request_id)
            case Reply(call_id, answer, failure):
                error = None if failure is None else failure.to_error()
                self._calls.settle(call_id, bytes(answer), error)
            case _:
                self.take(said)

    def _greet(self, hello: Hello) -> None:
        if hello.version != __version__:
            refusal = f"it is version {hello.version}, the engine is {__version__}: start anew"
            self._line.send(encoder.encode(Greeting(refusal, NO_ANSWER)))
            return
        self._is_welcome = True
        told = msgspec.Raw(encoder.encode(self.welcome()))
        self._line.send(encoder.encode(Greeting("", told)))
        self._send_soon()

    def _add(self, add: Add, attached: Attachments) -> None:
        try:
            spec = decode_spec(add, attached)
        except Exception as error:
            self._say(Reply(add.call_id, NO_ANSWER, Failure.of(error)))
            return
        spec = self.received(spec, add)

        async def run() -> None:
            failure = None
            self._claiming.add(spec.request_id)  # the first that is done, or it is refused at once
            try:
                samples = await self._engine.internals.accept(
                    spec,
                    add.adapter,
                    add.timeout,
                    lambda request, samples: _ForwardedState(
                        request, samples, self, hands_over=add.hands_over
                    ),
                    add.origin,
                )
                if samples.num_live:
                    self._samples[spec.request_id] = samples
            except Exception as error:
                failure = Failure.of(error)
                if not isinstance(error, AioserveError):
                    logger.exception("%s could not be accepted", spec.request_id)
            finally:
                self._claiming.discard(spec.request_id)
            self._say(Reply(add.call_id, NO_ANSWER, failure))

        def forget(task: asyncio.Task[None]) -> None:
            if self._adding.get(spec.request_id) is task:
                del self._adding[spec.request_id]

        self._adding[spec.request_id] = task = asyncio.create_task(run())
        task.add_done_callback(forget)

    def _abort(self, request_id: str) -> None:
        """Abort a request of this worker; another worker's of that id goes on."""
        if request_id in self._samples or request_id in self._claiming:
            self._engine.abort_now(request_id)

    def _drop(self, request_id: str) -> None:
        if (task := self._adding.get(request_id)) is not None:
            task.cancel()
        if (samples := self._samples.pop(request_id, None)) is not None:
            self.outbox.forget(samples.ids)
            self._engine.internals.drop(samples)

    def _stop(self, num_tokens: dict[str, int]) -> None:
        self.outbox.forget(num_tokens)
        own = set(self._samples)
        if not own.issuperset(num_tokens):  # one of several; or it has ended, and is another's now
            own.update(*(samples.ids for samples in self._samples.values()))
        owned = {i: count for i, count in num_tokens.items() if i in own}
        self._engine.internals.end_stopped(owned)
        for sample_id in num_tokens:
            # The id of its request, if that is for one sample; else one of several has ended.
            samples = self._samples.get(sample_id)
            if samples is None:
                self._samples = {i: own for i, own in self._samples.items() if own.num_live}
            elif not samples.num_live:
                del self._samples[sample_id]

    def _say(self, message: MessageToWorker) -> None:
        self.outbox.messages.append(message)
        self._send_soon()

    def _send_soon(self) -> None:
        """Send what comes in one turn of the loop in one message."""
        if not self._is_sending_soon:
            self._is_sending_soon = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """All that is there, if there is room; after each step with outputs of this client."""
        self._is_sending_soon = False
        if not (self.outbox and self._is_welcome):
            return
        if not self._line.is_full and self._line.send(self.outbox.encode()):
            self.outbox.clear()
        else:
            self.outbox.merge()


# The engine's side of its workers: answers what they ask for the whole server. Requests and their
# outputs are the forwarder's. Knows no HTTP and no text; which processes the workers are, `pool`
# knows.


# Seconds after which a worker that does not answer is left out: it hangs, or has no core to run on.
# A guess.
ANSWER_SECONDS = 2.0

_command = decoder(TO_HOST)


class Host:
    """All workers of one engine, which has been started."""

    def __init__(self, engine: AsyncEngine, access: MainAccess) -> None:
        self.engine = engine
        self.access = access
        access.on_reload = self._tell_keys
        self.responses = ResponseStore()
        self.workers: list[WorkerClient] = []
        #: Called with each that could take connections, and waits to be told.
        self.on_prepared: Callable[[WorkerClient], None] = WorkerClient.listen
        self.log_level: SetLogLevel | None = None  # None: that of the settings
        self._refused_by_gone: Refusals = Counter()
        self._telling: asyncio.Future[list[Any]] | None = None  # held, or it may be collected
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def open(self, name: str, address: str, on_listening: Callable[[], None]) -> "WorkerClient":
        """Wait at `address` for the worker of that name; `on_listening` is called when it takes
        connections. Raises `OSError`, and `EngineDeadError` when there is no engine any more.
        """
        worker = WorkerClient(self, name, self._context, address, on_listening)
        self.workers.append(worker)
        return worker

    def close(self, worker: "WorkerClient") -> int:
        """End the requests of a worker whose process has ended. Returns how many there were."""
        self.workers.remove(worker)
        self._refused_by_gone += worker.refusals
        return worker.close()

    def shutdown(self) -> None:
        """Close the lines to all workers, which have ended."""
        for worker in list(self.workers):
            self.close(worker)
        self._context.term()

    async def answer(self, command: Command[Any], asking: "WorkerClient") -> Any:
        """Run a command that a worker asks for. Raises what the engine raises."""
        match command:
            case ShowMetrics():
                await self._hear_reports()
                return await self.engine.ask(ShowMetrics())  # what it has counted is in its report
            case AbortElsewhere(request_id, reach):
                others = [worker for worker in self.workers if worker is not asking]
                return any(await _ask_all(others, AbortHere(request_id, reach)))
            case KeepResponse(response_id, kept):
                return await self.responses.put(response_id, kept)
            case FindResponse(response_id):
                return await self.responses.get(response_id)
            case ForgetResponse(response_id):
                return await self.responses.forget(response_id)
            case EnterAccount(lease, key_name, claim):
                return asking.enter_account(lease, key_name, claim)
            case EnterQueue(lease):
                return asking.enter_queue(lease)
            case EndLease(lease):
                return asking.end_lease(lease)
        assert isinstance(command, EngineCommand)
        answer = await self.engine.ask(command)
        if isinstance(command, LoadAdapter | UnloadAdapter):
            # Before the client, which may ask any worker next, hears of it.
            paths = AdapterPaths(dict(self.engine.adapters.paths))
            await _ask_all(self.workers, KnowAdapters(paths))
        if isinstance(command, SetLogLevel):
            self.log_level = command
            await _ask_all(self.workers, command)
        return answer

    async def _hear_reports(self) -> None:
        """Read what workers report of themselves, for the metrics."""
        asked = [worker for worker in self.workers if worker.is_listening]
        reports = await _ask_all(asked, MakeReport())
        told = [pair for pair in zip(asked, reports, strict=True) if pair[1] is not None]
        metrics = self.engine.metrics
        metrics.loop_lags = {worker.name: report.loop_lag for worker, report in told}
        metrics.loop_delays = {"engine": metrics.loop_delays["engine"]} | {
            worker.name: report.loop_delay for worker, report in told
        }
        metrics.counted = {worker.name: report.counted for worker, report in told}
        for worker, report in told:
            worker.refusals = Counter({(why, key): n for why, key, n in report.refusals})
        self.access.refused_elsewhere = sum(
            (worker.refusals for worker in self.workers), self._refused_by_gone
        )

    def _tell_keys(self, keys: Sequence[Key]) -> None:
        self._telling = asyncio.ensure_future(_ask_all(self.workers, KnowKeys(list(keys))))


class WorkerClient(Forwarder):
    """One worker in one life, from before it is connected."""

    def __init__(
        self,
        host: Host,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_listening: Callable[[], None],
    ) -> None:
        self.is_prepared = False
        self.is_listening = False
        self.refusals: Refusals = Counter()  # as it told last
        self._host = host
        self._on_listening = on_listening
        self._leases: dict[int, Callable[[], None]] = {}  # what ends each of them
        self._answering: set[asyncio.Task[Any]] = set()

        def make_line(on_message: OnMessage, on_room: Callable[[], None]) -> Line:
            return Line(context, address, listens=True, on_message=on_message, on_room=on_room)

        super().__init__(host.engine, name, make_line)

    def listen(self) -> None:
        """Tell the worker to take connections from now on."""
        self._say(Listen())

    def quit(self, exit_code: int) -> None:
        """Have the worker close its connections, and end."""
        self._say(Quit(exit_code))

    def close(self) -> int:
        for task in self._answering:
            task.cancel()
        num_requests = super().close()
        for lease in list(self._leases):
            self.end_lease(lease)
        return num_requests

    def enter_account(self, lease: int, key_name: str, claim: Claim) -> None:
        """A request of this worker with that key begins. Raises what `Accounts.enter` raises."""
        accounts = self._host.access.accounts
        held = accounts.enter(key_name, claim)
        self._leases[lease] = lambda: accounts.leave(key_name, held)

    def enter_queue(self, lease: int) -> None:
        """A request of this worker counts as waiting. Raises `EngineOverloadedError`."""
        self._leases[lease] = self._engine.internals.enter_queue()

    def end_lease(self, lease: int) -> None:
        """Leave what was entered under this number, if anything was."""
        if (end := self._leases.pop(lease, None)) is not None:
            end()

    async def ask(self, command: Command[Any], seconds: float = ANSWER_SECONDS) -> Any:
        """Return its answer; None if it is not there yet, does not answer in time, or is gone."""
        if not self._is_welcome:
            return None
        number, future = self._calls.begin()
        self._say(Ask(number, msgspec.Raw(encoder.encode(command))))
        try:
            async with asyncio.timeout(seconds):
                return decoder(command.answer_type).decode(await future)
        except (TimeoutError, AioserveError):
            return None

    def welcome(self) -> Welcome:
        engine = self._engine
        return Welcome(
            engine.config,
            self._client_index,
            engine.started_at,
            engine.max_model_len,
            engine.internals.runner_info,
            dict(engine.adapters.paths),
            list(self._host.access.keyring.keys),
        )

    def refuse(self) -> None:
        self.quit(EXIT_FAILED)

    def take(self, said: MessageToEngine) -> None:
        match said:
            case Ask(call_id, command):
                self._spawn(self._answer(call_id, bytes(command)))
            case Prepared():
                self.is_prepared = True
                self._host.on_prepared(self)
            case Listening():
                self.is_listening = True
                if (log_level := self._host.log_level) is not None:
                    self._spawn(self.ask(log_level))  # it was started with that of the settings
                self._on_listening()

    async def _answer(self, call_id: int, encoded: bytes) -> None:
        answer, failure = NO_ANSWER, None
        try:
            command = _command.decode(encoded)
            answer = msgspec.Raw(encoder.encode(await self._host.answer(command, self)))
        except Exception as error:
            failure = Failure.of(error)
            if not isinstance(error, AioserveError):
                logger.exception("a command of %s could not be answered", self.name)
        self._say(Reply(call_id, answer, failure))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)


async def _ask_all(workers: Iterable[WorkerClient], command: Command[Any]) -> list[Any]:
    return list(await asyncio.gather(*(worker.ask(command) for worker in workers)))
