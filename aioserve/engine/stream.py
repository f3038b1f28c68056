"""A request as its reader has it: the stream of its outputs, its samples, and their ids.

A request keeps its ids to itself while one of its samples lives. Knows nothing about text.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import msgspec

from aioserve.engine.step_loop import FAULTS
from aioserve.errors import RequestIdInUseError
from aioserve.outputs import EngineCoreOutput, FinishReason, RequestOutput
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec

# The queue between the engine and the one reader of a request. Bounded without waiting: a slow
# reader gets fewer, longer deltas. Knows nothing about scheduling.


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
        self._text_takers: dict[int, Callable[[str], bool]] = {}  # by sample
        self.takes_texts = False  # whether `offer_texts_to` was called
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def offer_to(self, take: Callable[[RequestOutput], bool]) -> None:
        """Offer deltas to `take` before they are queued, so that no task is woken for them.

        What it takes (True) is not iterated over. It gets no last delta of a sample, and none
        while an earlier one is pending. If it raises, it is forgotten, and the delta is queued.
        """
        self._offer = take

    def offer_texts_to(self, index: int, take: Callable[[str], bool]) -> None:
        """Offer what is text alone of a sample to `take`, before it is made into an output: most
        tokens take this way. For the rest `offer_to` says what is offered, and what becomes of it.
        """
        self._text_takers[index] = take
        self.takes_texts = True

    def put_text(self, index: int, text: str) -> bool:
        """Hand over the text, perhaps empty, of a delta that says no more and is not the last of
        its sample. False: it was not taken, and is to be `put` as an output.
        """
        take = self._text_takers.get(index)
        if take is None or self._pending:
            return False
        try:
            return take(text)
        except FAULTS:
            del self._text_takers[index]
            self._warn()
            return False

    def put(self, output: RequestOutput) -> None:
        """Hand over the next delta of a sample. Never waits."""
        if self._offer is not None and not self._pending and output.finish_reason is None:
            try:
                if self._offer(output):
                    return
            except FAULTS:  # it must not end the delivery to others
                self._offer = None  # one reader's trouble, which it will meet again by itself
                self._warn()
        pending = self._pending.get(output.index)
        if pending is None:
            self._pending[output.index] = output
        else:
            pending.merge(output)
        if output.finish_reason is not None:
            self._num_unfinished -= 1
        waiter = self._waiter  # `_wake`, without a call for each token
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

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

    def _warn(self) -> None:
        logger.warning("%s: a delta is queued instead", self.request_id, exc_info=True)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# The samples of one request, their ids, and what delivery must know of each sample. A request keeps
# its ids to itself while one of its samples lives. Knows nothing about text, nor what reads it.


class Origin(msgspec.Struct, array_like=True, frozen=True):
    """The origin of a request, for logs and traces; policies do not see it."""

    client: str = ""  # address
    model: str = ""  # or adapter, as it was asked for
    operation: str = ""  # what OpenTelemetry calls it; "" without traces
    trace_headers: dict[str, str] = {}  # the trace it belongs to, as W3C has it


class Samples:
    """The samples of one request: they share a reader, and no other request gets
    their ids or its own while one of them lives.
    """

    __slots__ = (
        "adapter_id",
        "claimed_ids",
        "ids",
        "is_aborted",
        "is_arriving",
        "let_go",
        "num_live",
        "origin",
        "request_id",
    )

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self.ids = self.claimed_ids = [self.request_id]
        if n > 1:
            self.ids = [f"{self.request_id}-{i}" for i in range(n)]
            self.claimed_ids = [self.request_id, *self.ids]
        self.num_live = n
        self.is_arriving = True  # being tokenized: nothing can be ended yet
        self.is_aborted = False  # meanwhile
        self.adapter_id = ""
        self.origin = Origin()
        # Of their adapter, or no longer waits for it; may be called again.
        self.let_go: Callable[[], None] | None = None

    def specs(self, spec: RequestSpec) -> Iterator[RequestSpec]:
        """Yield what each sample is of what was asked for: one token after another from its own
        seed.
        """
        if len(self.ids) == 1:
            yield spec
            return
        params = spec.sampling_params
        for index, sample_id in enumerate(self.ids):
            own = msgspec.structs.replace(
                params,
                n=1,
                seed=None if params.seed is None else params.seed + index,
                # Of the prompt that they share, the first sample tells.
                prompt_logprobs=None if index else params.prompt_logprobs,
            )
            yield msgspec.structs.replace(spec, request_id=sample_id, sampling_params=own)


class Claims:
    """The ids that are taken, and the requests that have them."""

    def __init__(self) -> None:
        self._claims: dict[str, Samples] = {}  # by every id that is taken

    def claim(self, request_id: str, n: int) -> Samples:
        """Take the ids of a request and its `n` samples. Raises `RequestIdInUseError`."""
        samples = Samples(request_id, n)
        for request_id in samples.claimed_ids:
            if request_id in self._claims:
                raise RequestIdInUseError(f"request id {request_id!r} is in use")
        self._claims.update(dict.fromkeys(samples.claimed_ids, samples))
        return samples

    def samples_of(self, request_id: str) -> Samples | None:
        """Return the samples of a request that lives, by the id that its caller knows."""
        samples = self._claims.get(request_id)
        return samples if samples is not None and samples.request_id == request_id else None

    def ids(self) -> list[str]:
        """Return all that are taken, of requests and of samples."""
        return list(self._claims)

    def arriving_ids(self) -> list[str]:
        """Return the requests that are being tokenized, by the ids that their callers know."""
        return [key for key, of in self._claims.items() if of.is_arriving and of.request_id == key]

    def release(self, samples: Samples) -> bool:
        """Give the ids back. False if that was done before: they may be another's."""
        if self._claims.get(samples.request_id) is not samples:
            return False
        for request_id in samples.claimed_ids:
            del self._claims[request_id]
        if samples.let_go is not None:
            samples.let_go()
        return True


def wants_only_end(params: SamplingParams) -> bool:
    """Return whether nothing need be done for a token before the end: it is read only then.

    A stop string is looked for in every delta, and log probabilities are kept nowhere else: there
    the deltas are made, and merged.
    """
    return (
        params.output_kind == "final_only"
        and not params.stop_strings
        and params.logprobs is None
        and params.prompt_logprobs is None
    )


class SampleState(ABC):
    """The state of one sample between two of its outputs, wherever they are read."""

    is_read_here = True  # else in another process, which knows where it comes from
    hands_over = False  # another engine goes on with it, from its KV blocks
    __slots__ = (
        "first_token_time",
        "last_token_time",
        "num_output_tokens",
        "request",
        "samples",
        "scheduled_time",
        "waits_for_end",
    )

    def __init__(self, request: Request, samples: Samples, *, waits_for_end: bool) -> None:
        """`waits_for_end`: of what comes before the end it is told nothing."""
        self.request = request
        self.samples = samples
        self.waits_for_end = waits_for_end
        self.num_output_tokens = 0
        # In seconds of the engine's clock; None: not yet.
        self.scheduled_time: float | None = None  # when the first step that has it was planned
        self.first_token_time: float | None = None  # or that of the vector of a prompt
        self.last_token_time: float | None = None

    @abstractmethod
    def deliver(self, output: EngineCoreOutput, now: float) -> FinishReason | None:
        """Hand it to the reader at `now`, in seconds of the engine's clock. Returns why the sample
        has ended by that, which may be a stop string; None if it goes on.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Hand over an error instead of more tokens."""
