"""One request at a replica: sent, read, and sent elsewhere if that replica dies before it answers.

Knows Ray's handles and errors. Knows no HTTP and no tokenizer.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray.exceptions
from ray import serve
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from aioserve.engine.stream import RequestStream
from aioserve.errors import (
    AioserveError,
    EngineDeadError,
    EngineOverloadedError,
    RequestFailedError,
)
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.ray.route import ROUTE, Route
from aioserve.routing import MAX_WAIT_SECONDS, MIN_WAIT_SECONDS, Refuse, RoutedRequest

logger = logging.getLogger(__name__)

# A request that three replicas did not survive may be why.
MAX_ATTEMPTS = 3

# In which a replica ends a request that it was told to abort; then its reader is told without it.
# A guess.
ABORT_SECONDS = 2.0

_REPLICA_IS_GONE = (ray.exceptions.RayActorError, ReplicaUnavailableError, EngineDeadError)


class TimeLeft:
    """Until a time of `time.monotonic` of this process; pickled it is that number of seconds."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    @property
    def seconds(self) -> float:
        """Above 0, as a replica wants it."""
        return max(self._deadline - time.monotonic(), 1e-3)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """When a replica gets it: waiting for one is waiting, too."""
        return float, (self.seconds,)


class Call:
    """`begin` raises all refusals; then the stream gets the outputs."""

    def __init__(
        self,
        handle: DeploymentHandle,
        arguments: dict[str, Any],
        request: RoutedRequest,
        stream: RequestStream,
        n: int,
        on_end: Callable[[], object],
    ) -> None:
        """`arguments` are those of `EngineReplica.submit`; `on_end` is called when nothing more
        will come of it, unless it was dropped before it began.
        """
        self._handle = handle
        self._arguments = arguments
        self._request = request
        self._stream = stream
        self._n = n
        self._on_end = on_end
        self._num_attempts = 0
        self._avoid: set[str] = set()  # names of replicas that have failed it
        self._route = Route(request)
        self._response: DeploymentResponseGenerator[Any] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._is_aborted = False
        self._let_go = asyncio.Event()
        self._waits_since: float | None = None  # time of the router's first answer to wait
        self._last: dict[int, RequestOutput] = {}  # of each sample

    async def begin(self) -> None:
        """Returns when a replica has accepted it, or it has ended before. Raises what
        `AsyncEngine.add_request` does.
        """
        if await self._send():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._end)
        else:
            self._route.has_ended()
            self._on_end()

    def let_go(self) -> None:
        """End it before it has begun: `begin` returns."""
        self._is_aborted = True
        self._let_go.set()
        self._cancel()

    def drop(self) -> None:
        """Cancel the call, which has no reader any more."""
        if self._reading is not None:
            self._reading.cancel()
        else:
            self._cancel()
            self._route.has_ended()

    def abort(self) -> bool:
        """End it where it is: its reader gets what there is. Whether it really ends by this."""
        if self._reading is None or self._reading.done() or self._is_aborted:
            return False
        self._is_aborted = True
        self._aborting = asyncio.create_task(self._abort(self._reading, self._route.replica))
        return True

    async def _abort(self, reading: "asyncio.Task[None]", replica: str | None) -> None:
        if replica is not None:  # else a router of Ray's has chosen, which takes no orders
            abort = self._handle.options(method_name="abort")
            route = {ROUTE: Route(RoutedRequest(num_tokens=0), only=replica)}
            with contextlib.suppress(Exception):
                async with asyncio.timeout(ABORT_SECONDS):
                    await abort.remote(self._stream.request_id, **route)
                    await asyncio.wait([reading])
        if not reading.done():
            reading.cancel()
            self._tell_end(FinishReason.ABORT)

    async def _send(self) -> bool:
        """To a replica that lives and accepts it. False if it has ended before."""
        left: TimeLeft | None = self._arguments["timeout"]
        submit = self._handle.options(method_name="submit", stream=True)
        try:
            async with asyncio.timeout(None if left is None else left.seconds):
                while not self._is_aborted:
                    self._num_attempts += 1
                    self._route.has_ended()
                    self._route = self._make_route()
                    self._response = submit.remote(**self._arguments, **{ROUTE: self._route})
                    try:
                        await anext(self._response)
                        if not self._is_aborted:
                            return True
                    except Exception as error:
                        answer = self._route.answer
                        if isinstance(answer, Refuse):
                            told = answer.reason, answer.retry_after
                            raise EngineOverloadedError(*told) from error
                        if answer is not None:
                            self._num_attempts -= 1
                            await self._wait(answer.seconds)
                        elif not self._is_aborted:
                            self._check_again(error)
            reason = FinishReason.ABORT
        except TimeoutError:
            reason = FinishReason.TIMEOUT
        self._cancel()
        self._tell_end(reason)
        return False

    def _make_route(self) -> Route:
        """The route of the next attempt."""
        loop = asyncio.get_running_loop()

        def take_back() -> None:
            if self._route is route:
                self._cancel()

        route = Route(
            msgspec.structs.replace(self._request, num_attempts=len(self._avoid)),
            avoid=frozenset(self._avoid),
            on_answer=lambda: loop.call_soon_threadsafe(take_back),
        )
        return route

    async def _wait(self, seconds: float) -> None:
        """The router is to be asked again after these seconds. Raises `EngineOverloadedError` for a
        call that has waited too long in all.
        """
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        left = self._waits_since + MAX_WAIT_SECONDS - now
        if left <= 0:
            raise EngineOverloadedError(f"no replica was chosen within {MAX_WAIT_SECONDS:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(seconds, MIN_WAIT_SECONDS), left)):
                await self._let_go.wait()

    async def _read(self) -> None:
        try:
            while True:
                try:
                    await self._read_one_replica()
                    return
                except Exception as error:
                    if self._is_aborted:
                        return self._tell_end(FinishReason.ABORT)
                    if self._last:
                        raise
                    self._check_again(error)
                if not await self._send():
                    return
        except Exception as error:
            self._stream.fail(_ours(error))

    async def _read_one_replica(self) -> None:
        assert self._response is not None
        async for output in self._response:
            if not self._last:
                self._route.has_started()
            self._last[output.index] = output
            self._stream.put(output)

    def _check_again(self, error: Exception) -> None:
        """Raises what the caller should hear, unless another replica may do better."""
        cause = _cause(error)
        if not isinstance(cause, _REPLICA_IS_GONE) or self._num_attempts >= MAX_ATTEMPTS:
            raise _ours(error) from error
        if (replica := self._route.replica) is not None:
            self._avoid.add(replica)
        logger.warning(
            "%s is sent to another replica: %s", self._stream.request_id, type(cause).__name__
        )

    def _tell_end(self, reason: FinishReason) -> None:
        """To the reader, of what has not ended."""
        for index in range(self._n):
            last = self._last.get(index)
            if last is None or last.finish_reason is None:
                self._stream.put(
                    RequestOutput(
                        request_id=self._stream.request_id,
                        index=index,
                        finish_reason=reason,
                        num_prompt_tokens=self._stream.num_prompt_tokens,
                        num_output_tokens=0 if last is None else last.num_output_tokens,
                        num_cached_tokens=0 if last is None else last.num_cached_tokens,
                    )
                )

    def _end(self, reading: "asyncio.Task[None]") -> None:
        """However it did, be it before the task had its first turn."""
        if reading.cancelled():
            self._cancel()
        self._route.has_ended()
        self._on_end()

    def _cancel(self) -> None:
        if self._response is not None:
            with contextlib.suppress(Exception):
                self._response.cancel()


def _cause(error: BaseException) -> BaseException:
    """What was raised in the replica, without Ray's wrapping."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(error, ray.exceptions.RayTaskError) and cause is not None else error


def _ours(error: Exception) -> Exception:
    """As the engine would have raised it."""
    cause = _cause(error)
    if isinstance(cause, AioserveError):
        return cause
    if isinstance(cause, (*_REPLICA_IS_GONE, serve.exceptions.DeploymentUnavailableError)):
        return EngineDeadError("the replica that served this request has died")
    return RequestFailedError(f"the replica failed ({type(cause).__name__})")
