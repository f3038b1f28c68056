"""A request of vLLM's as aioserve sees it: what a policy may read of it, and where hints come from.

Nothing that only a model or a sampler needs is translated: vLLM's own request goes on to its
runner. Arrival times of vLLM's are times of the day, and those of aioserve of a monotonic clock.
"""

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from vllm.v1.engine import EngineCoreEventType, FinishReason
from vllm.v1.request import Request as TheirRequest
from vllm.v1.request import RequestStatus as TheirStatus

from aioserve.errors import RequestError
from aioserve.outputs import FinishReason as OurReason
from aioserve.params import PoolingParams, SamplingParams
from aioserve.request import (
    MAX_HINTS,
    PREDICTED_OUTPUT_TOKENS,
    SESSION,
    Hints,
    Request,
    RequestSpec,
    RequestStatus,
    check_hints,
)
from aioserve.vllm.caches import encoder_inputs

#: Names in `vllm_xargs` (`SamplingParams.extra_args`) that are no hints: fields of a request, and
#: vLLM's own.
USER, DEADLINE = "user", "deadline"
_NO_HINTS = (
    *(USER, DEADLINE),
    *("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"),
)

#: Hints of other servers' clients that have a name of aioserve's, as at its own HTTP API.
FOREIGN_NAMES = {"osl": PREDICTED_OUTPUT_TOKENS}

#: By the reason for which aioserve ends a request, the one that vLLM's client is told. vLLM has no
#: word for a time that was up, and none for a policy that turns a request away: `stop_reason` says
#: more.
REASONS = {
    OurReason.STOP: FinishReason.STOP,
    OurReason.LENGTH: FinishReason.LENGTH,
    OurReason.ABORT: FinishReason.ABORT,
    OurReason.TIMEOUT: FinishReason.ABORT,
    OurReason.REJECTED: FinishReason.ABORT,
    OurReason.ERROR: FinishReason.ERROR,
}
#: By the reason for which a request has ended, its status at vLLM.
ENDS = {
    FinishReason.STOP: TheirStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: TheirStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.ABORT: TheirStatus.FINISHED_ABORTED,
    FinishReason.ERROR: TheirStatus.FINISHED_ERROR,
    FinishReason.REPETITION: TheirStatus.FINISHED_REPETITION,
}
#: By the status with which vLLM ends a request, aioserve's.
STATUSES = {
    TheirStatus.FINISHED_STOPPED: RequestStatus.FINISHED_STOPPED,
    TheirStatus.FINISHED_LENGTH_CAPPED: RequestStatus.FINISHED_LENGTH_CAPPED,
    TheirStatus.FINISHED_ABORTED: RequestStatus.FINISHED_ABORTED,
    TheirStatus.FINISHED_IGNORED: RequestStatus.FINISHED_LENGTH_CAPPED,
    TheirStatus.FINISHED_ERROR: RequestStatus.FINISHED_ERROR,
    TheirStatus.FINISHED_REPETITION: RequestStatus.FINISHED_STOPPED,
}


class Tracked:
    """One request that has not ended, in vLLM's words and in aioserve's."""

    __slots__ = ("follows_tokens", "is_known", "is_plain", "is_structured", "ours", "theirs")

    def __init__(self, theirs: TheirRequest, ours: Request) -> None:
        self.theirs = theirs
        self.ours = ours
        self.is_known = False  # vLLM's runner has a state of it
        #: Its next output is its tokens, and how the request ends if it does; nothing else.
        self.is_plain = False
        self.is_structured = theirs.structured_output_request is not None
        params = theirs.sampling_params
        repeats = params is not None and params.repetition_detection is not None
        #: vLLM looks at its tokens, so its own request has to have them.
        self.follows_tokens = self.is_structured or repeats

    def record(self, event: EngineCoreEventType, timestamp: float) -> None:
        """Note for vLLM's metrics that something has happened, at a time of `time.monotonic`."""
        self.theirs.record_event(event, timestamp)
        self.is_plain = False

    def settle(self) -> None:
        """Note that the first output was made: what is of the prompt has been told."""
        params = self.theirs.sampling_params
        asks = params is not None and params.num_logprobs is not None
        self.is_plain = not (asks or self.theirs.trace_headers or self.follows_tokens)


class Arrivals:
    """Times of the day, as vLLM notes them, as times of aioserve's clock. All are shifted by the
    same distance, so that requests keep the order in which they came: two clocks that are read for
    each would be read with a pause between them now and then.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shift = clock() - time.time()  # seconds

    def __call__(self, arrival_time: float) -> float:
        """Return the time of the clock; never a time to come."""
        now = self._clock()
        shift = now - time.time()
        if abs(shift - self._shift) > MAX_DRIFT:
            self._shift = shift
        return min(arrival_time + self._shift, now)


#: Seconds by which the time of the day may be off before the distance is measured anew: somebody
#: has set it.
MAX_DRIFT = 0.5


def to_ours(
    theirs: TheirRequest,
    arrivals: Callable[[float], float],
    *,
    whole_images: bool = False,
    only_ordered: bool = False,
) -> Tracked:
    """Return the request as aioserve sees it; `arrivals` returns times of aioserve's clock. With
    `whole_images`, the tokens of an image or sound run in one step. `only_ordered`: vLLM's own
    scheduler serves it, so that prompt embeddings stand as tokens 0, images are left out, and what
    is no deadline counts as none.
    Raises `RequestError` for what is not translated.
    """
    if theirs.resumable:
        raise RequestError("aioserve.vllm.Scheduler takes no streaming input (resumable requests)")
    prompt = theirs.prompt_token_ids
    if only_ordered and prompt is None:
        prompt = [0] * theirs.num_prompt_tokens
    if prompt is None or (theirs.prompt_embeds is not None and not only_ordered):
        raise RequestError("aioserve.vllm.Scheduler takes token ids, and no prompt embeddings")
    params, pooling = theirs.sampling_params, theirs.pooling_params
    extra = (None if params is None else params.extra_args) or {}
    # vLLM says so where prompt logprobs are asked for, for means of all states, and where a client
    # wants no cache.
    needs_all = theirs.skip_reading_prefix_cache
    arrival_time = arrivals(theirs.arrival_time)
    deadline = _number(extra, DEADLINE, or_none=only_ordered)
    eos = None if params is None else params.eos_token_id
    lora = theirs.lora_request
    spec = RequestSpec(
        request_id=theirs.request_id,
        prompt_token_ids=prompt,
        sampling_params=_sampling_params(
            theirs.max_tokens,
            0 if params is None else params.min_tokens,
            () if params is None else tuple(params.stop_token_ids or ()),
            0 if needs_all else None,
        ),
        pooling_params=(
            None if pooling is None else PoolingParams(pooling="mean" if needs_all else "last")
        ),
        arrival_time=arrival_time,
        eos_token_ids=() if eos is None else (eos,),
        priority=theirs.priority,
        user=str(extra.get(USER) or ("" if lora is None else lora.lora_name)),
        cache_salt=theirs.cache_salt or "",
        # vLLM numbers each adapter that it loads: one of the same name that is loaded later has
        # other weights, and shares no blocks.
        adapter_id="" if lora is None else f"{lora.lora_name}@{lora.lora_int_id}",
        encoder_inputs=(
            () if only_ordered else encoder_inputs(theirs.mm_features, whole=whole_images)
        ),
        deadline=None if deadline is None else arrival_time + deadline,
        client_index=theirs.client_index,
        hints=hints_of(theirs.session_id, extra),
    )
    return Tracked(theirs, Request(spec))


@lru_cache(maxsize=256)
def _sampling_params(
    max_tokens: int, min_tokens: int, stop_token_ids: tuple[int, ...], prompt_logprobs: int | None
) -> SamplingParams:
    """Return what ends a request. Of most requests it is the same, and to check it takes as long as
    all else that is made of an arrival.
    """
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        prompt_logprobs=prompt_logprobs,
    )


def hints_of(session_id: str | None, extra: Mapping[str, Any]) -> Hints:
    """Return the hints of a request: `session_id` of vLLM's as the hint `session`, and what
    `extra_args` say under the name of a hint. What is no text, flag or number, or has no name of a
    hint, is for another part of vLLM: custom logits processors read the same map.
    """
    found: dict[str, Any] = {} if session_id is None else {SESSION: session_id}
    for name, value in extra.items():
        hint = FOREIGN_NAMES.get(name, name)
        if name not in _NO_HINTS and hint not in found and len(found) < MAX_HINTS:
            try:
                check_hints({hint: value})
            except RequestError:
                continue
            found[hint] = value
    return found


def _number(extra: Mapping[str, Any], name: str, *, or_none: bool) -> float | None:
    """Return a number of seconds that `extra_args` state. What is none of them is None if `or_none`
    says so, and a `RequestError` otherwise.
    """
    value = extra.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and value > 0):
        if or_none:
            return None
        raise RequestError(f"vllm_xargs.{name} must be seconds above 0, got {value!r:.80}", name)
    return float(value)
