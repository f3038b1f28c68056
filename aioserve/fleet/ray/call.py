"""One request at a replica: sent, read, sent elsewhere if that replica dies, moved on purpose.

A request may be split behind its prompt, migrated, or gone on with after a death.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import ray.exceptions
from ray.serve.exceptions import ReplicaUnavailableError

from aioserve.engine.clock import Clock
from aioserve.engine.stream import RequestStream, Samples
from aioserve.errors import (
    AioserveError,
    EngineDeadError,
    EngineOverloadedError,
    RequestFailedError,
)
from aioserve.fleet.ray.chooser import NO_REPLICA, AccountSeat, Chooser, OwnChooser, Seat
from aioserve.fleet.ray.fleet import Fleet, Movable
from aioserve.fleet.routing import (
    MAX_WAIT_SECONDS,
    MIN_WAIT_SECONDS,
    Dispatcher,
    RoutedRequest,
    RouterError,
    Wait,
)
from aioserve.fleet.workers.messages import Abort, Drop
from aioserve.fleet.workers.remote_engine import RemoteDelivery
from aioserve.outputs import EngineCoreOutput, FinishReason, RequestOutput
from aioserve.request import Request, RequestSpec

logger = logging.getLogger(__name__)

# A request that three replicas did not survive may be why.
MAX_ATTEMPTS = 3

# In which a replica ends a request that it was told to abort; then its reader is told without it.
# A guess.
ABORT_SECONDS = 2.0

_REPLICA_IS_GONE = (ray.exceptions.RayActorError, ReplicaUnavailableError, EngineDeadError)


class _LetGoError(Exception):
    """The caller waits no more for a replica to accept the request."""


class Call(RequestStream):
    """`begin` raises all refusals; then the reader's stream gets the outputs, by this one."""

    def __init__(
        self,
        chooser: Chooser,
        delivery: RemoteDelivery,
        clock: Clock,
        spec: RequestSpec,
        samples: Samples,
        adapter: str,
        request: RoutedRequest,
        stream: RequestStream,
        on_end: Callable[[], object],
        on_sent_again: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_end` is called when nothing more will come of it, `on_sent_again` each time that it
        is to go to another replica.
        """
        super().__init__(spec.request_id, len(samples.ids), abort=self.drop)
        self._chooser = chooser
        self._delivery = delivery
        self._clock = clock
        self._spec = spec
        self._samples = samples
        self._adapter = adapter
        self._request = request
        self._stream = stream
        self._on_end = on_end
        self._on_sent_again = on_sent_again
        self._num_live = len(samples.ids)
        self._num_attempts = 0
        self._avoid: set[str] = set()  # names of replicas that have failed it
        self._seat: Seat | None = None
        self._has_readers = False  # of its samples, since a replica has accepted it
        self._is_told = False  # something of it
        self._is_aborted = self._is_over = False
        self._let_go = asyncio.Event()
        self._replying: asyncio.Future[bytes] | None = None
        self._sending: asyncio.Task[None] | None = None  # to another replica
        self._giving_up: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None  # time of the router's first answer to wait

    async def begin(self) -> None:
        """Return when a replica has accepted it, or it has ended before. Raises what
        `AsyncEngine.add_request` does.
        """
        await self._send()

    def let_go(self) -> None:
        """End the call before it has begun: `begin` returns."""
        self._is_aborted = True
        self._let_go.set()
        if self._replying is not None and not self._replying.done():
            self._replying.set_exception(_LetGoError())

    def drop(self) -> None:
        """Forget the call, which has no reader any more."""
        if not self._is_over:
            if self._sending is not None:
                self._sending.cancel()
            self._tell_replica_to_drop()
            self._end()

    def abort(self) -> bool:
        """End it where it is: its reader gets what there is. Whether it really ends by this."""
        if self._is_over or self._is_aborted:
            return False
        if self._sending is not None or self._seat is None:
            self.let_go()
            return True
        self._is_aborted = True
        self._tell_abort(self._seat)
        return True

    def lost(self, error: EngineDeadError) -> None:
        """Note that the replica that has accepted the request is gone."""
        self._leave_seat()
        if self._is_told:
            self._fail(EngineDeadError("the replica that served this request has died"))
        elif self._is_aborted:
            self._finish(FinishReason.ABORT)
        else:
            self._sending = asyncio.create_task(self._send_again(error))

    def stop(self, error: EngineDeadError) -> None:
        """The front end ends: the reader gets the error, and no replica gets the call again."""
        if not self._is_over:
            if self._sending is not None:
                self._sending.cancel()
            self._tell_replica_to_drop()
            self._fail(error)

    # What the delivery tells, of each sample.

    def put_text(self, index: int, text: str) -> bool:
        """Pass a text on to the reader, who has taken the first output before."""
        return self._stream.put_text(index, text)

    def put(self, output: RequestOutput) -> None:
        """Pass an output on to the reader."""
        if not self._is_told:
            self._is_told = True
            if self._seat is not None:
                self._seat.has_started()
        self._stream.put(output)
        if output.finish_reason is not None:
            self._has_lost_one()

    def fail(self, error: BaseException) -> None:
        """Pass the error of a sample on to the reader."""
        self._stream.fail(error)
        self._has_lost_one()

    def _has_lost_one(self) -> None:
        self._num_live -= 1
        if not self._num_live:
            self._end()

    async def _send(self) -> None:
        """Send the request to a replica that lives and accepts it, unless it ends before."""
        deadline = self._spec.deadline
        reason = FinishReason.ABORT
        try:
            left = None if deadline is None else deadline - self._clock()
            async with asyncio.timeout(left):
                while not self._is_aborted:
                    if await self._try_one():
                        return
        except TimeoutError:
            reason = FinishReason.TIMEOUT
            self._tell_replica_to_drop()
        self._finish(reason)

    async def _try_one(self) -> bool:
        """Return whether a replica has accepted it. Raises what the caller should hear."""
        self._num_attempts += 1
        request = self._request
        if self._avoid:
            request = msgspec.structs.replace(request, num_attempts=len(self._avoid))
        try:
            choice = await self._choose(request)
            if not isinstance(choice, Wait):
                await self._submit(choice)
                if self._is_aborted and not self._is_over:  # while the answer was on its way
                    self._tell_abort(choice)
                return True
            self._num_attempts -= 1
            await self._wait(choice)
        except _LetGoError:
            self._tell_replica_to_drop()
        except Exception as error:
            self._leave_seat()
            self._check_again(error)
        return False

    async def _choose(self, request: RoutedRequest) -> Seat | Wait:
        return await self._chooser.choose(request, self._avoid, self._spec)

    async def _submit(self, seat: Seat) -> None:
        """Return when the replica has accepted it; raises its refusal."""
        await self._add(seat, self._spec, self._register)

    def _register(self) -> None:
        """Have its samples read from now on, from their first tokens."""
        self._has_readers = True
        for index, own in enumerate(self._samples.specs(self._spec.without_arrays())):
            self._delivery.processor.add_request(Request(own), self._samples, index, self)

    async def _add(
        self, seat: Seat, spec: RequestSpec, on_accepted: Callable[[], None], **asked: bool
    ) -> None:
        """Return when the replica has accepted `spec`; `asked` is what else `EngineEnd.add` takes.
        Raises its refusal.
        """
        self._seat = seat
        origin, deadline = self._samples.origin, spec.deadline

        def accept() -> None:
            on_accepted()
            seat.line.calls[self.request_id] = self

        seconds = None if deadline is None else max(deadline - self._clock(), 1e-3)
        self._replying = seat.line.end.add(spec, self._adapter, seconds, origin, accept, **asked)
        try:
            await self._replying
        except EngineDeadError as error:
            seat.line.lose(error)
            raise
        finally:
            self._replying = None

    async def _wait(self, answer: Wait) -> None:
        """The router is to be asked again after a while. Raises `EngineOverloadedError` for a call
        that has waited too long in all.
        """
        left = MAX_WAIT_SECONDS
        if answer is not NO_REPLICA:
            now = time.monotonic()
            if self._waits_since is None:
                self._waits_since = now
            left = self._waits_since + MAX_WAIT_SECONDS - now
            if left <= 0:
                raise EngineOverloadedError(f"no replica was chosen within {MAX_WAIT_SECONDS:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(answer.seconds, MIN_WAIT_SECONDS), left)):
                await self._let_go.wait()

    async def _send_again(self, error: Exception | None) -> None:
        """Send the request to another replica, after one has failed it with `error`, if one has."""
        try:
            if error is not None:
                self._check_again(error)
            await self._send()
        except Exception as failure:
            self._fail(failure)
        finally:
            if self._sending is asyncio.current_task():  # else its replica was lost meanwhile
                self._sending = None

    def _check_again(self, error: Exception) -> None:
        """Raises what the caller should hear, unless another replica may do better."""
        cause = _cause(error)
        if not isinstance(cause, _REPLICA_IS_GONE) or self._num_attempts >= MAX_ATTEMPTS:
            raise _ours(error) from error
        self._on_sent_again()
        logger.warning("%s is sent to another replica: %s", self.request_id, type(cause).__name__)

    def _leave_seat(self) -> None:
        """Leave the replica, which has failed the request, and avoid it from now on."""
        if self._seat is not None:
            self._avoid.add(self._seat.line.name)
            self._seat.has_ended()
            self._seat = None

    def _tell_abort(self, seat: Seat) -> None:
        """The replica ends it; its reader is told soon, whether or not the replica says so."""
        seat.line.end.say(Abort(self.request_id))
        loop = asyncio.get_running_loop()
        self._giving_up = loop.call_later(ABORT_SECONDS, self._give_up)

    def _tell_replica_to_drop(self) -> None:
        """Tell the replica to drop what it has of this request, or gets yet."""
        if (seat := self._seat) is not None:
            seat.line.calls.pop(self.request_id, None)
            seat.line.end.say(Drop(self.request_id))

    def _give_up(self) -> None:
        """The replica has not said what became of an abort."""
        if not self._is_over:
            self._tell_replica_to_drop()
            self._finish(FinishReason.ABORT)

    def _fail(self, error: BaseException) -> None:
        if self._has_readers:
            processor = self._delivery.processor
            processor.fail_requests(self._samples.ids, error, self._clock())
        else:
            self._stream.fail(error)
            self._end()

    def _finish(self, reason: FinishReason) -> None:
        """Tell the reader of an end that no replica tells, of each sample that has not ended."""
        if self._has_readers:
            self._delivery.processor.end_requests(self._samples.ids, reason, self._clock())
            return
        for index in range(self._num_live):
            self.put(
                RequestOutput(
                    request_id=self.request_id,
                    index=index,
                    finish_reason=reason,
                    num_prompt_tokens=self._stream.num_prompt_tokens,
                )
            )
        self._delivery.processor.claims.release(self._samples)

    def _end(self) -> None:
        self._is_over = True
        if self._giving_up is not None:
            self._giving_up.cancel()
        if self._seat is not None:
            self._seat.line.calls.pop(self.request_id, None)
            self._seat.has_ended()
        self._on_end()


def _cause(error: BaseException) -> BaseException:
    """Return what was raised in the replica, without Ray's wrapping."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(error, ray.exceptions.RayTaskError) and cause is not None else error


def _ours(error: Exception) -> Exception:
    """Return the error as the engine would have raised it."""
    cause = _cause(error)
    if isinstance(cause, AioserveError) and not isinstance(cause, EngineDeadError):
        return cause
    if isinstance(cause, _REPLICA_IS_GONE):
        return EngineDeadError(f"the replica that served this request has died: {cause}")
    return RequestFailedError(f"the replica failed ({type(cause).__name__})")


# A request that replicas share: split behind its prompt, migrated, or gone on with after a death.
# Each replica begins after the tokens of the one before it. The reader's stream, its text, stop
# strings and counts stay where they are, in the ingress. Knows seats and lines, as `Call` does.


def may_move(spec: RequestSpec) -> bool:
    """Return whether replicas can share the request: one reply, of which there is a token
    at least.
    """
    params = spec.sampling_params
    return spec.pooling_params is None and params.n == 1 and params.max_tokens != 0


def prompt_part(spec: RequestSpec) -> RequestSpec:
    """Return the request up to its first token, which is sampled as the whole request's is."""
    params = spec.sampling_params
    params = msgspec.structs.replace(params, max_tokens=1, min_tokens=min(params.min_tokens, 1))
    return msgspec.structs.replace(spec, sampling_params=params)


class MovingCall(Call, Movable):
    """One request, of which the tokens are kept. To be made where `may_move`."""

    def __init__(self, chooser: OwnChooser, max_model_len: int, *arguments: Any) -> None:
        """`arguments` are those of `Call`, behind the chooser."""
        super().__init__(chooser, *arguments)
        self._mover = chooser
        params, room = self._spec.sampling_params, max_model_len - len(self._spec.prompt_token_ids)
        self._room = min(room, params.max_tokens or room)  # for tokens of its reply
        self._token_ids: list[int] = []  # of its reply, so far
        self._goes_on = False  # with them, at the next replica
        self._source = ""  # name of the replica that had it before
        #: The end behind which another replica goes on; None: the replica has all that is left.
        self._leaves_by: FinishReason | None = None
        self._next: list[str] = []  # names of replicas that are tried before the router is asked

    def move(self, name: str) -> bool:
        """Have the replica of this name go on with it. False if the request is at none that could
        give it up now, or the other one is not there.
        """
        seat = self._seat
        if seat is None or seat.line.calls.get(self.request_id) is not self:
            return False
        is_busy = self._is_over or self._is_aborted or self._leaves_by is not None
        if is_busy or seat.line.name == name or not self._mover.has_room(name, self._num_tokens):
            return False
        self._leaves_by = FinishReason.ABORT
        self._next = [name, seat.line.name]
        seat.line.end.say(Abort(self.request_id))
        return True

    @property
    def _num_tokens(self) -> int:
        return len(self._spec.prompt_token_ids) + len(self._token_ids)

    # What the line tells.

    def keep(self, output: EngineCoreOutput) -> bool:
        self._token_ids += output.new_token_ids
        return output.finish_reason is not None and output.finish_reason is self._leaves_by

    def has_left(self) -> None:
        seat = self._seat
        if self._is_over or seat is None:
            return  # a stop string was in its last tokens
        seat.line.calls.pop(self.request_id, None)
        if self._is_aborted:  # by its client, meanwhile
            self._finish(FinishReason.ABORT)
            return
        seat.has_started()
        self._source, self._leaves_by, self._goes_on = seat.line.name, None, True
        self._num_attempts = 0
        self._sending = asyncio.create_task(self._send_again(None))

    def lost(self, error: EngineDeadError) -> None:
        """What its reader has heard goes on elsewhere; all else begins anew."""
        if not self._is_told or self._is_aborted or self._seat is None:
            self._goes_on, self._leaves_by, self._next = False, None, []
            super().lost(error)
            return
        self._source, self._leaves_by, self._goes_on = self._seat.line.name, None, True
        self._next = [name for name in self._next if name != self._source]
        self._leave_seat()
        self._sending = asyncio.create_task(self._send_again(error))

    # How it is sent.

    async def _choose(self, request: RoutedRequest) -> Seat | Wait:
        while self._next and self._seat is not None:
            seat = self._mover.moved(self._seat, self._next.pop(0))
            if seat is not None:
                return seat
        if self._seat is not None:  # the account of the replica that had it
            self._seat.has_ended()
            self._seat = None
        choice = await super()._choose(request)
        if self._goes_on and isinstance(choice, AccountSeat) and choice.decode:
            return self._mover.moved(choice, choice.decode) or choice
        return choice

    async def _submit(self, seat: Seat) -> None:
        if self._goes_on:
            tokens = tuple(self._token_ids)
            spec = msgspec.structs.replace(self._spec, output_token_ids=tokens)
            await self._add(seat, spec, lambda: self._has_arrived(seat))
            return
        self._token_ids = []
        if isinstance(seat, AccountSeat) and seat.decode and self._room > 1:
            self._leaves_by = FinishReason.LENGTH
            self._next = [seat.decode, seat.line.name]
            await self._add(seat, prompt_part(self._spec), self._register, hands_over=True)
        else:
            await super()._submit(seat)

    def _has_arrived(self, seat: Seat) -> None:
        """A replica has accepted it with its tokens so far."""
        self._next = []
        self._mover.has_moved(self._source, seat)

    def _leave_seat(self) -> None:
        """The account stays open while there is another replica to move it to."""
        if self._goes_on and self._next and self._seat is not None:
            self._avoid.add(self._seat.line.name)
        else:
            self._leaves_by, self._next = None, []
            super()._leave_seat()

    def _check_again(self, error: Exception) -> None:
        if self._goes_on and self._next:
            logger.warning("%s goes on at another replica: %s", self.request_id, error)
        else:
            super()._check_again(error)


# Requests of one ingress that may move, and the router that is asked which of them are to. Costs
# nothing where the router moves none. Knows calls; does not know how they travel.


class Mover:
    """One for each front end that has started."""

    def __init__(self, dispatcher: Dispatcher | None, max_model_len: int) -> None:
        """`dispatcher` asks the router; None: a router of Ray's, which moves nothing."""
        self._dispatcher = dispatcher
        self._moves = dispatcher is not None and dispatcher.kind.moves()
        self._max_model_len = max_model_len
        self._asking: asyncio.Task[None] | None = None
        self._last_error = ""

    def make_call(self, chooser: Chooser, spec: RequestSpec, *arguments: Any) -> Call:
        """Return the call of a request; `arguments` are those of `Call`, behind the chooser."""
        if self._moves and isinstance(chooser, OwnChooser) and may_move(spec):
            return MovingCall(chooser, self._max_model_len, *arguments)
        return Call(chooser, *arguments)

    def start(self, fleet: Fleet, calls: Mapping[str, Call]) -> None:
        """Ask the router from now on, if it migrates; `calls` are those that live, by id."""
        dispatcher = self._dispatcher
        if dispatcher is not None and (seconds := dispatcher.kind.rebalance_seconds) is not None:
            self._asking = asyncio.create_task(self._ask(dispatcher, seconds, fleet, calls))

    def close(self) -> None:
        """Ask the router no more which requests are to move. Idempotent."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(
        self, dispatcher: Dispatcher, seconds: float, fleet: Fleet, calls: Mapping[str, Call]
    ) -> None:
        while True:
            await asyncio.sleep(seconds)
            if fleet.lines:
                self._rebalance(dispatcher, calls)

    def _rebalance(self, dispatcher: Dispatcher, calls: Mapping[str, Call]) -> None:
        try:
            answers = dispatcher.rebalance()
        except RouterError as error:
            if str(error) != self._last_error:
                logger.error("%s; no request is moved", error)
                self._last_error = str(error)
            return
        for answer in answers:
            call = calls.get(answer.request_id)
            if isinstance(call, MovingCall):
                call.move(answer.to.name)
