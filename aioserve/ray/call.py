"""One request at a replica: sent, read, and sent elsewhere if that replica dies before it answers.

Knows Ray's handles and errors. Knows no HTTP and no tokenizer.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import ray.exceptions
from ray import serve
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from aioserve.engine.stream import RequestStream
from aioserve.errors import AioserveError, EngineDeadError, RequestFailedError
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.ray.route import ROUTE, Route

logger = logging.getLogger(__name__)

# A request that three replicas did not survive may be why.
MAX_ATTEMPTS = 3

_REPLICA_IS_GONE = (ray.exceptions.RayActorError, ReplicaUnavailableError, EngineDeadError)
_CANCELLED = (ray.exceptions.TaskCancelledError, asyncio.CancelledError)


class Call:
    """`begin` raises all refusals; then `stream` gets the outputs."""

    def __init__(
        self,
        handle: DeploymentHandle,
        arguments: dict[str, Any],
        route: Callable[[], Route],
        request_id: str,
        n: int,
        on_end: Callable[[], object],
    ) -> None:
        """`arguments` are those of `EngineReplica.submit`; `on_end` is called once, at its end."""
        self._handle = handle.options(method_name="submit", stream=True)
        self._arguments = arguments
        self._make_route = route
        self._on_end = on_end
        self._num_attempts = 0
        self._route = route()
        self._response: DeploymentResponseGenerator[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._last: dict[int, RequestOutput] = {}  # of each sample that has not finished
        self._has_output = False
        self._n = n
        self.stream = RequestStream(request_id, n, abort=self.drop)

    async def begin(self) -> None:
        """Returns when a replica has accepted it. Raises what `AsyncEngine.add_request` does."""
        try:
            self.stream.num_prompt_tokens = await self._send()
        except BaseException:
            self._cancel()
            self._on_end()
            raise
        self._task = asyncio.create_task(self._read())

    def drop(self) -> None:
        """Nobody reads it any more."""
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> bool:
        """End it: its reader gets what there is. Whether it has really ended by this."""
        if self._task is None or self._task.done():
            return False
        self._task.cancel()
        for index in range(self._n):
            last = self._last.get(index)
            if last is None or last.finish_reason is None:
                self.stream.put(
                    RequestOutput(
                        request_id=self.stream.request_id,
                        index=index,
                        finish_reason=FinishReason.ABORT,
                        num_prompt_tokens=self.stream.num_prompt_tokens,
                        num_output_tokens=0 if last is None else last.num_output_tokens,
                        num_cached_tokens=0 if last is None else last.num_cached_tokens,
                    )
                )
        return True

    async def _send(self) -> int:
        """To a replica that lives and accepts it; the number of its prompt tokens."""
        while True:
            self._num_attempts += 1
            self._route = self._make_route()
            self._response = self._handle.remote(**self._arguments, **{ROUTE: self._route})
            try:
                return int(await anext(self._response))
            except Exception as error:
                self._check_again(error)

    async def _read(self) -> None:
        try:
            while True:
                try:
                    await self._read_one_replica()
                    return
                except Exception as error:
                    if self._has_output:
                        raise
                    self._check_again(error)
                await self._send()
        except asyncio.CancelledError:
            self._cancel()
            raise
        except Exception as error:
            self.stream.fail(_ours(error))
        finally:
            self._on_end()

    async def _read_one_replica(self) -> None:
        assert self._response is not None
        async for output in self._response:
            if not self._has_output:
                self._has_output = True
                self._route.has_started()
            self._last[output.index] = output
            self.stream.put(output)

    def _check_again(self, error: Exception) -> None:
        """Raises what the caller should hear, unless another replica may do better."""
        cause = _cause(error)
        if not isinstance(cause, _REPLICA_IS_GONE) or self._num_attempts >= MAX_ATTEMPTS:
            raise _ours(error) from error
        logger.warning(
            "%s is sent to another replica: %s", self.stream.request_id, type(cause).__name__
        )

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
