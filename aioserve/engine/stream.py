"""The queue between the engine and the one reader of a request.

Bounded without waiting: a slow reader gets fewer, longer deltas. Knows nothing about scheduling.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from aioserve.outputs import RequestOutput
from aioserve.step_loop import FAULTS

logger = logging.getLogger(__name__)


class RequestStream:
    """An async iterator of `RequestOutput`; ends after all `n` samples have finished.

    Use it as `async with stream:`: leaving the block aborts what is unfinished. Raises
    `RequestFailedError` or `EngineDeadError` where the tokens would have come.
    """

    def __init__(self, request_id: str, n: int, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = 0  # known before the first read
        self.prompt_token_ids: Sequence[int] = ()  # those that are computed, as they are
        self._abort = abort
        self._num_unfinished = n
        self._pending: dict[int, RequestOutput] = {}  # at most one per sample: deltas are merged
        self._offer: Callable[[RequestOutput], bool] | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def offer_to(self, take: Callable[[RequestOutput], bool]) -> None:
        """Offer deltas to `take` before they are queued, so that no task is woken for them.

        What it takes (True) is not iterated over. It gets no last delta of a sample, and none
        while an earlier one is pending. If it raises, it is forgotten, and the delta is queued.
        """
        self._offer = take

    def put(self, output: RequestOutput) -> None:
        """Hand over the next delta of a sample. Never waits."""
        if self._offer is not None and not self._pending and output.finish_reason is None:
            try:
                if self._offer(output):
                    return
            except FAULTS:  # it must not end the delivery to others
                self._offer = None  # one reader's trouble, which it will meet again by itself
                logger.warning("%s: a delta is queued instead", self.request_id, exc_info=True)
        pending = self._pending.get(output.index)
        if pending is None:
            self._pending[output.index] = output
        else:
            pending.merge(output)
        if output.finish_reason is not None:
            self._num_unfinished -= 1
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, after what is pending."""
        self._error = error
        self._wake()

    def close(self) -> None:
        """Abort what is unfinished and end the stream. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._pending.clear()
            if self._num_unfinished > 0:  # one that has failed is not the only one, perhaps
                self._abort()
            self._wake()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._is_closed:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            if self._num_unfinished == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._pending.pop(next(iter(self._pending)))

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
