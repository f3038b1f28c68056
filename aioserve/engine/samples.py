"""The samples of one request, their ids, and what delivery must know of each sample.

A request keeps its ids to itself while one of its samples lives. Knows nothing about text, nor what
reads it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import msgspec

from aioserve.errors import RequestIdInUseError
from aioserve.outputs import EngineCoreOutput, FinishReason
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec


class Origin(msgspec.Struct, array_like=True, frozen=True):
    """Where a request comes from, for logs and traces; policies do not see it."""

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
        """What each sample is of what was asked for: one token after another from its own seed."""
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
    """Which ids are taken, and by which requests."""

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
        """The samples of a request that lives, by the id that its caller knows."""
        samples = self._claims.get(request_id)
        return samples if samples is not None and samples.request_id == request_id else None

    def ids(self) -> list[str]:
        """All that are taken, of requests and of samples."""
        return list(self._claims)

    def arriving_ids(self) -> list[str]:
        """The requests that are being tokenized, by the ids that their callers know."""
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
    """Whether nothing need be done for a token before the end: it is read only then.

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
    """What delivery needs to know of one sample between two of its outputs, wherever read."""

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
