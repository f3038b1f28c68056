"""The engine's side of its workers: answers what they ask for the whole server.

Requests and their outputs are the forwarder's. Knows no HTTP and no text; which processes the
workers are, `pool` knows.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec
import zmq

from aioserve.engine import AsyncEngine
from aioserve.errors import AioserveError
from aioserve.operations import (
    AbortElsewhere,
    LoadAdapter,
    SetLogLevel,
    ShowMetrics,
    UnloadAdapter,
)
from aioserve.operations.command import AdapterPaths, Command, EngineCommand
from aioserve.server.access.access import MainAccess, Refusals
from aioserve.server.access.keys import Claim, Key
from aioserve.server.running import ResponseStore
from aioserve.support.arguments import EXIT_FAILED
from aioserve.workers.forwarder import Forwarder
from aioserve.workers.line import Line, OnMessage
from aioserve.workers.messages import (
    NO_ANSWER,
    TO_HOST,
    AbortHere,
    Ask,
    EndLease,
    EnterAccount,
    EnterQueue,
    Failure,
    FindResponse,
    ForgetResponse,
    KeepResponse,
    KnowAdapters,
    KnowKeys,
    Listen,
    Listening,
    MakeReport,
    MessageToEngine,
    Prepared,
    Quit,
    Reply,
    Welcome,
    decoder,
    encoder,
)

logger = logging.getLogger(__name__)

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
        """Its process has ended: so do its requests. Returns how many there were."""
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
        """What workers tell of themselves, for the metrics."""
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
        self.access.metrics.elsewhere = sum(
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
        """Have it close what is open, and end."""
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
        """What was entered under this number is left, if anything was."""
        if (end := self._leases.pop(lease, None)) is not None:
            end()

    async def ask(self, command: Command[Any], seconds: float = ANSWER_SECONDS) -> Any:
        """Its answer; None if it is not there yet, does not answer in time, or is gone."""
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
