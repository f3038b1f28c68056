"""Outputs: of the runner, of the scheduler, and of the engine for one request.

Plain data. Knows nothing about the code that makes or reads it.
"""

import enum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector: TypeAlias = npt.NDArray[np.float32]
else:
    Vector = Any  # only code that has numpy makes one


class FinishReason(enum.StrEnum):
    """Why a request ended, in the words of the HTTP API."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length limit
    ABORT = "abort"  # the client left, or the engine shut down
    TIMEOUT = "timeout"  # a deadline passed; never disguised as length
    ERROR = "error"  # its step raised
    REJECTED = "rejected"  # by the policy, before it ran
    TOOL_CALLS = "tool_calls"  # a chat reply stopped after calls: the server's word, for stop


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities at one position, of the model's raw logits (natural log)."""

    logprob: float  # of the token that is there: sampled, or of the prompt
    rank: int  # of that token, 1 = most likely
    top_token_ids: list[int]  # most likely first, as many as were asked for
    top_logprobs: list[float]


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens that came together, and all that comes one per token: it is cut together, or a reply
    has log probabilities of tokens that are not in it.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token; None: not asked for

    def first(self, count: int) -> "NewTokens":
        """Return the first `count` tokens, with their log probabilities; all, if there are
        fewer.
        """
        if count >= len(self.token_ids):
            return self
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        return NewTokens(self.token_ids[:count], logprobs)


class ModelRunnerOutput(msgspec.Struct, frozen=True, gc=False):
    """The result of one step: plain lists, no tensors.

    `req_ids` repeats the keys of `SchedulerOutput.num_scheduled_tokens` in their order.
    `sampled_token_ids[i]` is empty while a prompt is not finished, else it holds the tokens of
    the step: one, and before it those draft tokens that turned out right.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = {}  # only for requests that asked
    draft_token_ids: dict[str, list[int]] = {}  # guesses of what comes next, to be verified
    failed: dict[str, str] = {}  # requests that cannot go on, and why: no tokens of theirs
    #: Of requests that asked, with their first token: of every prompt token after the first.
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    pooled: dict[str, Vector] = {}  # of requests that are pooled, once their prompt is computed
    row_values: dict[str, dict[str, float]] = {}  # of the newest tokens, if the policy wants any
    #: Requests that were to get a token and did not, as its mask was not ready: the last token that
    #: is known of them, and all behind it, have to be computed again. Nothing is wrong with them.
    sat_out: list[str] = []


EMPTY_RUNNER_OUTPUT = ModelRunnerOutput([], [])


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The changes that one step made for one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that matched
    new_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first token, if asked for
    embedding: Vector | None = None  # of a request that is pooled: all that comes of it


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler statistics after a step; counters are totals since the start."""

    num_steps: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_tokens: int  # known tokens of those in the queue
    num_paused_reqs: int = 0  # waiting requests that keep their KV blocks
    num_kv_blocks: int
    num_used_kv_blocks: int
    num_leased_kv_blocks: int = 0  # used KV blocks that leases hold and no request
    num_leases: int = 0
    num_state_slots: int = 0  # 0: a model without states
    num_free_state_slots: int = 0  # that no running request has
    num_window_blocks: int = 0  # of layers with a sliding window; 0: they have none of their own
    num_used_window_blocks: int = 0
    num_preemptions: int
    num_prefill_tokens: int  # scheduled, of prompts and of what is computed again
    num_decode_tokens: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_encoder_inputs: int = 0  # images and sounds that were encoded
    num_encoder_tokens: int = 0  # tokens of the images and sounds that were encoded
    num_encoder_hits: int = 0  # inputs of requests whose outputs were there already
    num_used_encoder_tokens: int = 0  # of outputs that are kept now
    num_draft_tokens: int  # sent along to be verified
    num_accepted_tokens: int  # draft tokens that were right
    policy: str = ""  # as the settings name it
    policy_gauges: dict[str, float] = {}  # what the policy shows of itself, by name

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that live requests and leases hold, 0 to 1."""
        return self.num_used_kv_blocks / self.num_kv_blocks

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the tokens of admitted requests that were cached, 0 to 1."""
        return self.num_prefix_hit_tokens / max(self.num_prefix_queried_tokens, 1)


class EngineCoreOutputs(msgspec.Struct, frozen=True):
    """All outputs of one step for one client."""

    outputs: list[EngineCoreOutput]
    timestamp: float = 0.0  # scheduler clock, seconds


class RequestTimes(msgspec.Struct, frozen=True, gc=False):
    """The times at which one sample of a request came, began and ended: seconds of one clock, which
    is `time.monotonic` unless the engine runs in virtual time. Their differences mean something.

    Of an engine in this process these are the engine's own. `AsyncClient` measures what it sees:
    when the request was sent, and when the first tokens and the last output had been read.
    """

    arrival: float  # the request was made, before its prompt was tokenized
    finished: float  # the last output of the sample was made
    first_token: float | None = None  # the first token was there; None: there was none, or unseen
    scheduled: float | None = None  # the first step with it was planned; None: never, or unseen

    @property
    def duration(self) -> float:
        """Seconds from arrival to end."""
        return self.finished - self.arrival

    @property
    def to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT); None where that is not known."""
        return None if self.first_token is None else self.first_token - self.arrival


_T = TypeVar("_T")


class _Merged(list[_T]):
    """A list that one output has made for itself: it may grow in place, however often."""


def _merged(begun: list[_T], more: list[_T]) -> list[_T]:
    own = begun if isinstance(begun, _Merged) else _Merged(begun)
    own.extend(more)
    return own


class RequestOutput(msgspec.Struct, kw_only=True):
    """New text and tokens of one sample of a request since the last `RequestOutput`.

    A slow reader gets fewer, longer ones: nothing is lost, deltas are merged.
    """

    request_id: str
    index: int = 0  # which of the n samples
    text: str = ""  # new text only
    token_ids: list[int] = []  # new tokens only
    logprobs: list[TokenLogprobs] | None = None  # one per new token, if asked for
    #: One per prompt token, None for the first; in the first output of sample 0, if asked for.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # of this sample so far
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    embedding: Vector | None = None  # of a request that is pooled, once it has finished
    times: RequestTimes | None = None  # with the last output of the sample

    @property
    def finished(self) -> bool:
        """Whether this is the last output of this sample."""
        return self.finish_reason is not None

    def merge(self, newer: "RequestOutput") -> None:
        """Append `newer`, the next delta of the same sample."""
        self.text += newer.text
        self.token_ids = _merged(self.token_ids, newer.token_ids)
        if newer.logprobs is not None:
            self.logprobs = _merged(self.logprobs or [], newer.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or newer.prompt_logprobs
        self.finish_reason = newer.finish_reason
        self.stop_reason = newer.stop_reason
        self.num_output_tokens = newer.num_output_tokens
        self.num_cached_tokens = newer.num_cached_tokens
        self.embedding = newer.embedding
        self.times = newer.times


class FinishedOutput(RequestOutput, kw_only=True):
    """The whole reply of one sample: all its text and tokens, why it ended, and its times."""

    finish_reason: FinishReason
    times: RequestTimes


class EmbeddingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of one prompt."""

    request_id: str
    embedding: Vector  # float32 [hidden size, or the dimensions asked for]
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens that were found in the prefix cache
