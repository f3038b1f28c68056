"""One request as the scheduler sees it: what was asked for, token ids and counts.

Hints are what a client, or who routes for it, tells the policy beyond the request's fields: a
small map of named values, which a policy reads as `request.hints`. No hint changes what is
answered. A name means what the policy makes of it; some have a meaning that tools share. Row
values are numbers that a runner tells of a row besides its token, for a policy that wants them.
"""

import enum
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias
from zlib import crc32

import msgspec

from aioserve.errors import ConfigError, RequestError
from aioserve.outputs import FinishReason
from aioserve.params import PoolingParams, SamplingParams

Hints: TypeAlias = dict[str, str | bool | int | float]
NO_HINTS: Hints = {}

MAX_HINTS = 16
MAX_TEXT = 256  # characters of a value that is a text
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")

#: Length of the reply in tokens, as a predictor says it: a number.
PREDICTED_OUTPUT_TOKENS = "predicted_output_tokens"
#: The conversation, and the agent's program of several requests, that the request belongs to.
SESSION, PROGRAM = "session", "program"
#: The class of service levels that the request is to be held to.
SLO_CLASS = "slo_class"
#: Time to first token, and time per further token, that the request should keep to, in seconds.
SLO_TTFT, SLO_TPOT = "slo_ttft", "slo_tpot"
#: How fast the reply is read, in tokens per second.
READING_SPEED = "reading_speed"
#: The name of the tool that the reply will call, as far as the client knows.
TOOL = "tool"
#: A flag: nobody waits for the reply now.
OFFLINE = "offline"
#: Seconds after the end of the reply for which the client wants its prefix kept: a number.
CACHE_SECONDS = "cache_seconds"
MAX_CACHE_SECONDS = 3600.0


def check_hints(hints: Mapping[str, object]) -> None:
    """Raises `RequestError` for too many hints, a name that is none, or a value that is neither a
    short text nor a flag nor a finite number.
    """
    if not isinstance(hints, dict):
        raise RequestError(f"hints must be a map of names to values, got {hints!r:.80}", "hints")
    if len(hints) > MAX_HINTS:
        raise RequestError(f"at most {MAX_HINTS} hints are taken, got {len(hints)}", "hints")
    for name, value in hints.items():
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise RequestError(
                "the name of a hint has up to 64 of a-z, 0-9, '_', '-' and '.', and begins with a "
                f"letter; got {name!r:.80}",
                "hints",
            )
        if isinstance(value, str):
            if len(value) > MAX_TEXT or not value.isprintable():
                raise RequestError(
                    f"hints.{name} must be printable text of up to {MAX_TEXT} characters", "hints"
                )
        elif not isinstance(value, int | float):
            raise RequestError(
                f"hints.{name} must be a text, a number or a flag, got {value!r:.80}", "hints"
            )
        elif abs(value) >= 2**63 or not math.isfinite(value):  # in this order: int may be no float
            raise RequestError(f"hints.{name} must be a finite 64-bit number, got {value}", "hints")


# One request as the scheduler sees it: what was asked for, token ids and counts. Knows nothing
# about text, tensors, tasks or clients; the client is a number.


class RequestStatus(enum.IntEnum):
    """The status of a request. Everything that begins with FINISHED is final."""

    WAITING = enum.auto()  # never ran
    PREEMPTED = enum.auto()  # ran, lost its blocks, waits to be computed again
    RUNNING = enum.auto()  # admitted: it holds KV blocks
    FINISHED_STOPPED = enum.auto()  # by a stop token or stop string
    FINISHED_LENGTH_CAPPED = enum.auto()  # by max_tokens or max_model_len
    FINISHED_ABORTED = enum.auto()  # by the client or the server
    FINISHED_TIMEOUT = enum.auto()  # its deadline or --queue-timeout passed
    FINISHED_ERROR = enum.auto()  # by a failed step or policy
    FINISHED_REJECTED = enum.auto()  # by the policy, before it ran
    # Logs hold the numbers of the others; what is final is FINISHED_STOPPED and above.
    PAUSED = -1  # ran and stepped aside: it waits, and keeps its KV blocks

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason | None:
        """The word for it in the HTTP API; None while the request lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_TIMEOUT: FinishReason.TIMEOUT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REJECTED: FinishReason.REJECTED,
}


class WaitReason(enum.StrEnum):
    """The reason why a waiting request was not served in the last step: what it lacks itself, or
    what the request before it lacked at which the policy stopped. Requests that the policy went
    past, it has left out for a reason of its own.
    """

    BUDGET = "budget"  # no tokens left in the step, or too few for a whole prompt; max_requests
    SEATS = "seats"  # max_num_seqs requests are running
    ADAPTERS = "adapters"  # running requests use max_loras adapters, and not its own
    BLOCKS = "blocks"  # its tokens do not fit the free KV blocks
    LEASES = "leases"  # the same, and leases hold some of those that are missing
    STATES = "states"  # no state slot is free (models with states)
    WINDOWS = "windows"  # the pool of sliding windows has no room for its own
    ENCODER_BUDGET = "encoder_budget"  # its next image is being encoded, or there is no room for it
    DEADLINE = "deadline"  # the policy expects it to miss its deadline anyway
    PREEMPTED = "preempted"  # it was preempted in this very step
    PAUSED = "paused"  # the policy paused it, and did not ask for it since
    REMOTE_KVS = "remote_kvs"  # not in the waiting queue while its KV blocks load
    IN_FLIGHT = "in_flight"  # preempted; a step that contains it is still running
    POLICY = "policy"  # the policy did not ask for it, and was not stopped before it


class EncoderInput(msgspec.Struct, frozen=True, eq=False):
    """One image or sound in a prompt: it stands for `num_tokens` tokens from `position` on.

    What is known of its content besides the hash is for the runner alone: two of one hash are
    equal, with or without arrays.
    """

    position: int
    num_tokens: int
    content_hash: str
    arrays: Mapping[str, Any] | None = None  # numpy, by name: what the encoder reads
    whole: bool = False  # its tokens see each other: all of them run in one step
    num_embeds: int | None = None  # tokens with a vector of the encoder, no marks; None: all

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncoderInput) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[int, int, str, bool, int]:
        return self.position, self.num_tokens, self.content_hash, self.whole, self.size

    @property
    def size(self) -> int:
        """Vectors of its encoder: what the encoder's budget and cache of outputs count."""
        return self.num_tokens if self.num_embeds is None else self.num_embeds

    @property
    def end(self) -> int:
        """The first position after the input's tokens."""
        return self.position + self.num_tokens


class RequestSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of a request, declared once: code that watches, records or repeats a request
    passes its spec on, or a copy with other values. Raises `RequestError` that names the field.
    """

    request_id: str  # unique among unfinished requests
    prompt_token_ids: Sequence[int]  # never changed: the samples of a prompt share it
    sampling_params: SamplingParams  # temperature, max_tokens, stop, ...
    arrival_time: float = 0.0  # scheduler clock, seconds
    eos_token_ids: Sequence[int] = ()  # of the model; they end it unless it ignores them
    priority: int = 0  # smaller is more urgent
    user: str = ""  # the client's name, as the request states it; empty: none
    cache_salt: str = ""  # requests share blocks only within one salt
    adapter_id: str = ""  # requests share blocks only within one adapter
    encoder_inputs: Sequence[EncoderInput] = ()  # images and sounds, in order of position
    deadline: float | None = None  # time at which it ends with a timeout, scheduler clock
    client_index: int = 0  # index of the front end that receives its outputs
    pooling_params: PoolingParams | None = None  # set: an embedding request, no output tokens
    key_name: str = ""  # name of its API key; empty: none is required
    hints: Hints = {}  # what the client tells the policy, by name; never changed
    output_token_ids: Sequence[int] = ()  # of another engine, which had it: it goes on after them

    def __post_init__(self) -> None:
        if self.hints != {}:
            check_hints(self.hints)
        try:  # all at once: every request comes by here
            "".join((self.request_id, self.user, self.cache_salt, self.adapter_id)).encode()
            wrong: tuple[str, ...] = ()
        except (TypeError, UnicodeEncodeError):
            wrong = "request_id", "user", "cache_salt", "adapter_id"
        for name in wrong:
            text = getattr(self, name)
            if not isinstance(text, str):
                raise RequestError(f"{name} must be a string, got {text!r}", param=name)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"{name} is not valid Unicode: {error}", name) from error
        if not (isinstance(self.priority, int) and -(2**63) <= self.priority < 2**63):
            raise RequestError(
                f"priority must be a 64-bit integer, got {self.priority!r}", "priority"
            )

    def without_arrays(self) -> "RequestSpec":
        """Return all that a scheduler reads, and no image itself."""
        if all(item.arrays is None for item in self.encoder_inputs):
            return self
        items = [msgspec.structs.replace(item, arrays=None) for item in self.encoder_inputs]
        return msgspec.structs.replace(self, encoder_inputs=items)


class Request:
    """Token ids and progress. There is no prefill or decode phase: `num_computed_tokens` chases
    `num_target_tokens`, and a step gives it some number of tokens.

    The counts, in tokens:

        0 ... num_computed_tokens     keys and values are in blocks, or a step in flight writes them
          ... num_tokens              known: the prompt and the output received so far
          ... num_target_tokens       to be computed: the known tokens, plus one that a step in
                                      flight will sample, or plus draft tokens to be verified;
                                      never the last before the length limit, because its
                                      keys and values are never read

    `num_computed_tokens` does not count service: it includes the cached prefix, is 0 after a
    preemption, and falls when draft tokens were wrong. The tokens that a step gives to each request
    are in `num_scheduled_tokens` of what `step.output()` returns, by id; `step.run` and
    `step.admit` return them, too, and `step.run_decodes` gives one token, or more with drafts, to
    each request that it serves (`step.requests`).
    """

    __slots__ = (
        "adapter_id",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "client_index",
        "deadline",
        "draft_token_ids",
        "encoder_inputs",
        "hints",
        "max_total_tokens",
        "num_accepted_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_external_tokens",
        "num_found_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "num_target_tokens",
        "num_tokens",
        "order_key",
        "plain_from",
        "pooling_params",
        "priority",
        "request_id",
        "row_values",
        "sampling_params",
        "spec",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "user",
        "wait_reason",
        "wait_step_id",
    )

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec  # the fields of the request, unchanged
        # What steps and policies read of it is quicker to reach here.
        self.request_id = spec.request_id
        self.sampling_params = params = spec.sampling_params
        self.arrival_time = spec.arrival_time
        self.priority = spec.priority
        self.user = spec.user
        self.hints = spec.hints
        self.cache_salt = spec.cache_salt
        self.adapter_id = spec.adapter_id
        self.encoder_inputs = tuple(spec.encoder_inputs)
        end = self.encoder_inputs[-1].end if self.encoder_inputs else 0
        self.plain_from = end  # position behind encoder inputs: tokens from it need only KV blocks
        self.deadline = spec.deadline
        self.client_index = spec.client_index
        self.pooling_params = spec.pooling_params
        self.status = RequestStatus.WAITING  # set by the scheduler alone
        self.stop_reason: int | None = None  # the stop token that ended it
        self.token_ids = [*spec.prompt_token_ids, *spec.output_token_ids]  # prompt, then output
        self.num_prompt_tokens = len(spec.prompt_token_ids)  # tokens of the prompt
        self.num_tokens = len(self.token_ids)  # tokens of the prompt and the output so far
        self.max_total_tokens = 0  # limit of num_tokens; set by add_request
        eos = () if params.ignore_eos else spec.eos_token_ids
        self.stop_token_ids = frozenset((*eos, *params.stop_token_ids))  # any of them ends it
        self.num_computed_tokens = 0  # scheduled so far, the cached prefix included
        self.num_target_tokens = self.num_tokens  # the value that `num_computed_tokens` moves to
        self.num_preemptions = 0  # how often it was preempted
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache on first admission
        self.num_external_tokens = 0  # those of num_cached_tokens that a KV connector loaded
        self.draft_token_ids: list[int] = []  # draft tokens that its next step verifies
        self.num_draft_tokens = 0  # draft tokens that were verified so far
        self.num_accepted_tokens = 0  # those of num_draft_tokens that were right
        self.row_values = NO_ROW_VALUES  # of its newest token, those that the policy wants, by name
        self.wait_reason = WaitReason.POLICY  # why it was not admitted in step wait_step_id
        self.wait_step_id = 0  # the last step in which it was passed over with a reason
        self.order_key: Any = None  # a tuple around what `order` said; compare it with other keys
        # Owned by the KV cache manager:
        self.block_ids: list[int] = []  # KV blocks that it holds; empty unless it runs or is paused
        self.num_slots = 0  # tokens that block_ids have room for
        self.block_hashes: list[bytes] = []  # one per full block of known tokens, on demand
        self.num_cached_blocks = 0  # leading blocks that are in the prefix index
        self.num_found_blocks = 0  # blocks of the prefix cache with which it was last admitted

    def bound_length(self, max_model_len: int) -> None:
        """Set `max_total_tokens` from `max_tokens` and the model's limit for prompt and output.

        An embedding request gets room for a token that is never sampled: the last is not computed.
        Raises `RequestError` for a prompt that is empty or leaves no room for an output.
        """
        num_prompt_tokens, max_tokens = self.num_prompt_tokens, self.sampling_params.max_tokens
        if num_prompt_tokens < 1:
            raise RequestError("the prompt must have at least one token", param="prompt")
        if self.pooling_params is not None:
            max_model_len, max_tokens = max_model_len + 1, 1
        if num_prompt_tokens >= max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {max_model_len} "
                "for prompt and output together",
                "prompt",
            )
        self.max_total_tokens = max_model_len
        if max_tokens is not None:  # of none, one is sampled and dropped: it ends the request
            max_tokens = max(max_tokens, 1)
            self.max_total_tokens = min(max_model_len, num_prompt_tokens + max_tokens)

    @property
    def conversation(self) -> tuple[str, str, object]:
        """Equal for turns of one conversation of a client (hint `session`), else of it alone."""
        return self.cache_salt, self.user, self.hints.get(SESSION, (self.request_id,))

    @property
    def encoder_end(self) -> int:
        """The first position after all encoder inputs; 0 without any."""
        return self.plain_from

    @property
    def takes_cached_prefix(self) -> bool:
        """Whether the request can use cached KV blocks: not if it needs the state of every prompt
        token, for a mean or for prompt logprobs.
        """
        if self.pooling_params is not None:
            return self.pooling_params.pooling != "mean"
        return (
            self.sampling_params.prompt_logprobs is None or self.num_tokens > self.num_prompt_tokens
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and received so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """How many tokens this request could be given now."""
        return self.num_target_tokens - self.num_computed_tokens

    @property
    def is_prefill(self) -> bool:
        """Whether more than the newest of its known tokens is to be computed."""
        return self.num_tokens - self.num_computed_tokens > 1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed, "
            f"{self.num_prompt_tokens} prompt)"
        )


#: What requests are sorted by while they wait.
order_key = attrgetter("order_key")
by_arrival: Callable[[Request], float] = attrgetter("arrival_time")
by_user: Callable[[Request], str] = attrgetter("user")


# Hints as policies read them: a client may state anything under any name, so a hint of another
# type counts as not given.


def hinted_number(request: Request, name: str, default: float) -> float:
    """Return the number that the request states as the hint `name`, else `default`; a flag
    is none.
    """
    value = request.hints.get(name)
    return default if isinstance(value, bool | str | None) else float(value)


def hinted_text(request: Request, name: str, default: str = "") -> str:
    """Return the text that the request states as the hint `name`, else `default`; a number
    is none.
    """
    value = request.hints.get(name)
    return value if isinstance(value, str) else default


def hinted_flag(request: Request, name: str) -> bool:
    """Return whether the request states the hint `name` as true."""
    return request.hints.get(name) is True


# Row values: numbers that a runner tells of a row besides its token, for a policy that wants them.
# `entropy` is built in. Any other name is that of a function, `package.module:function`, which is
# given logits. Where there is no model, in the lab, the shadow and the contract, values are
# invented: they say nothing. Free of torch.


#: Of the model's own distribution of the next token, in nats: 0 if it is certain.
ENTROPY = "entropy"
#: The part of a step that says which values are wanted, by request id.
ROW_VALUES = "row_values"
MAX_NAMES = 8
# Invented values lie between 0 and this. A guess at what entropies are.
MAX_INVENTED = 5.0

#: By name, the values of a request's newest token.
RowValues = Mapping[str, float]
NO_ROW_VALUES: RowValues = {}


def check_names(names: object, policy: str) -> tuple[str, ...]:
    """Return the names of the values that a policy wants. Raises `ConfigError` for what is none."""
    if not isinstance(names, tuple) or len(names) > MAX_NAMES:
        raise ConfigError(
            f"policy {policy}: wants_row_values must be a tuple of at most {MAX_NAMES} names, got "
            f"{names!r:.80}"
        )
    for name in names:
        if not isinstance(name, str) or (name != ENTROPY and ":" not in name):
            raise ConfigError(
                f"policy {policy}: wants_row_values names {name!r:.80}; there are {ENTROPY!r} and "
                "functions, as 'package.module:function'"
            )
    return names


@cache
def find_function(name: str) -> Callable[[Any], Any]:
    """Return the function of that name, which is given float logits [S, V] of S rows, not to be
    changed, and returns S numbers. Raises `ConfigError` if there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(f"the row value {name!r} cannot be imported: {error!r}") from error
    if not callable(found):
        raise ConfigError(f"the row value {name!r} is no function, it is {found!r:.80}")
    return found  # type: ignore[no-any-return]  # whatever it is, it can be called


def invented(names: tuple[str, ...], key: object, place: int) -> dict[str, float]:
    """Return values for the token at `place` of the request that `key` stands for: always
    the same.
    """
    return {name: crc32(f"{name} {key} {place}".encode()) / 2**32 * MAX_INVENTED for name in names}
