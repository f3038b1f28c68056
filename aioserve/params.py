"""What a caller may ask of the sampler, of an embedding and of the text of a reply.

Sampling parameters and the ranges that make sense, structured outputs, a bound on reasoning
tokens, and how a model recommends to sample its replies: the values of fields that a request
leaves open.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import force_setattr

from aioserve.errors import ConfigError, RequestError

MAX_FORCED_TOKENS = 512


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound on reasoning tokens: after `max_tokens` of them the end mark is forced, token by
    token, and the reply goes on as if the model had written it.

    Tokens of the marks are not counted; tokens of a text before the end mark in `forced` are.
    Raises `RequestError` that names the field.
    """

    max_tokens: int  # reasoning tokens; 0: the reply begins with the end mark
    start: str  # the text with which reasoning begins, as "<think>"
    end: str  # the text with which it ends, as "</think>"
    is_implied: bool = False  # a reply begins inside of reasoning, though no text says so
    is_repeated: bool = False  # reasoning may begin again, and anywhere: all of it counts
    forced: str = ""  # the text that is forced, with `end` in it; empty: `end` alone
    forced_token_ids: tuple[int, ...] = ()  # filled in by the engine

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise RequestError(
                f"thinking_budget must be at least 0 tokens, got {self.max_tokens}",
                param="thinking_budget",
            )
        if not self.end or self.end not in self.text:
            raise RequestError(
                f"thinking_budget.forced must hold the end mark {self.end!r}, got {self.forced!r}",
                param="thinking_budget",
            )

    @property
    def text(self) -> str:
        """The text that is forced when the budget is spent."""
        return self.forced or self.end


# What the text of a reply must look like: a schema, a pattern, a choice or a grammar. As it is
# asked for, and what cannot be meant. Knows nothing about tokens; `grammars` does.


WAYS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def _keep_tuples(params: msgspec.Struct, names: Iterable[str]) -> None:
    """Replace lists in the fields of these names by tuples, which no caller can change later."""
    for name in names:
        if isinstance(value := getattr(params, name), list):
            force_setattr(params, name, tuple(value))


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[Callable[[object], Iterable[Any]], list[Any]]:
    """Return what gets all values of a struct, and its fields, in one order."""
    fields = list(msgspec.structs.fields(kind))
    return attrgetter(*(field.name for field in fields)), [(it.default, it) for it in fields]


def _check_types(params: msgspec.Struct) -> dict[str, Any]:
    """Return the values that are not the defaults, by field: the others need no look. Raises
    `RequestError` that names the field for a value of another type than the field's.
    """
    values_of, fields = _fields(type(params))
    stated: dict[str, Any] = {}
    for value, (default, field) in zip(values_of(params), fields, strict=True):
        if value is not default:
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                from aioserve.support.mistakes import expected

                words = f"{field.name} must be {expected(error)}, got {value!r:.80}"
                raise RequestError(words, param=field.name) from None
            stated[field.name] = value
    return stated


class StructuredOutputs(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    repr_omit_defaults=True,
    weakref=True,
):
    """One way to say it, in the words of vLLM. Raises `RequestError` for none or several.

    Whether it can be compiled is known at the engine's door.
    """

    json: dict[str, Any] | str | None = None  # a JSON schema
    json_object: bool | None = None  # any JSON object
    regex: str | None = None  # all of the text, in the syntax of Rust's `regex`
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # Lark as llguidance has it, or the GBNF (EBNF) of llama.cpp
    #: Free text; what follows a trigger is bound by a schema: {"structures": [...], "triggers": []}
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None  # in JSON: between its parts

    def __post_init__(self) -> None:
        _keep_tuples(self, ("choice",))
        given = [name for name in WAYS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes one of {', '.join(WAYS)}, got "
                f"{' and '.join(given) or 'none'}",
                param="structured_outputs",
            )
        if self.choice is not None and not self.choice:
            raise RequestError(
                "structured_outputs.choice must hold at least one text",
                param="structured_outputs.choice",
            )

    @property
    def way(self) -> str:
        """The name of the field that is given."""
        return next(name for name in WAYS if getattr(self, name) not in (None, False))


# What a caller may ask of the sampler, and the ranges that make sense. Knows nothing about models:
# token ids are checked against a vocabulary at the engine's door.


MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_N = 128
# Each character of a reply is compared with every stop string, on the event loop; what one of them
# may begin is held back, for each sample.
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 16_384
MAX_STOP_TOKEN_IDS = 1024
# Bad words are compared with what was said last, in every step; on a device, in its memory.
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 64
MAX_BAD_WORD_TOKENS = 16


class Range(NamedTuple):
    """Range of a numeric parameter, and its description in errors."""

    words: str
    ge: float
    le: float = sys.float_info.max
    other_than: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether `value` is in the range. Infinity and NaN never are."""
        return self.ge <= value <= self.le and value != self.other_than


#: By field, of numbers.
RANGES: dict[str, Range] = {
    "n": Range(f"between 1 and {MAX_N}", ge=1, le=MAX_N),
    "max_tokens": Range("at least 1", ge=1),
    "min_tokens": Range("at least 0", ge=0),
    "temperature": Range("between 0 and 2", ge=0, le=2),  # as at OpenAI
    "top_p": Range("above 0 and at most 1", ge=0, le=1, other_than=0),
    "top_k": Range("-1 or 0 (all tokens) or at least 1", ge=-1),
    "min_p": Range("between 0 and 1", ge=0, le=1),
    "seed": Range("a 64-bit integer", ge=-(2**63), le=2**63 - 1),
    "presence_penalty": Range("between -2 and 2", ge=-2, le=2),
    "frequency_penalty": Range("between -2 and 2", ge=-2, le=2),
    # It multiplies or divides logits: what is far from 1 leaves nothing of what the model says.
    "repetition_penalty": Range("between 0.01 and 10", ge=0.01, le=10),
    "truncate_prompt_tokens": Range(
        "-1 (what leaves room for max_tokens) or at least 1", ge=-1, other_than=0
    ),
    "logprobs": Range(f"between 0 and {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS),
    "prompt_logprobs": Range(f"between 0 and {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS),
}
#: Parameters that not every runner serves, and what is said of one that does not. The runner of the
#: CPU and the simulated one serve all of them, unless the model stands in the way; that of a card
#: serves those that its executor names in `RunnerInfo.parameters`. Where one is not served, it is
#: refused, and the cards of the models do not name it. The error says that this engine's runner, or
#: this model, "does not ...".
RUNNER_PARAMETERS: dict[str, str] = {
    "prompt_logprobs": "does not give the logits of prompts",
}
#: Of a value of `logit_bias`.
BIAS_RANGE = Range("between -100 and 100", ge=-100, le=100)
#: By field, of lists: how many entries they hold at most.
MAX_ENTRIES = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "bad_words_ids": 2 * MAX_BAD_WORDS,
}
#: Fields that a caller may give as lists.
KEPT_LISTS = frozenset(("stop", "stop_token_ids", "allowed_token_ids", "bad_words"))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which one request is sampled, and when it stops. Raises `RequestError` that names
    the field.

    The order of operations on a row of logits: repetition, presence and frequency penalties;
    `logit_bias`; stop tokens masked until `min_tokens`; `bad_words`, which are only said where
    nothing else is allowed; all tokens masked that `allowed_token_ids` or `structured_outputs` do
    not allow; temperature; `top_k`; `top_p`; `min_p`.
    """

    n: int = 1  # independent samples of one prompt
    max_tokens: int | None = None  # absent: the model's limit; 0: only prompt_logprobs
    truncate_prompt_tokens: int | None = None  # last tokens of the prompt that are kept
    min_tokens: int = 0  # tokens before which no EOS, stop token or stop string ends it
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # share of the probability; the most likely one is always kept
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0  # relative to the most likely token
    seed: int | None = None  # same seed, same logits: same tokens, whatever the batch
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # over output tokens, as OpenAI defines it
    frequency_penalty: float = 0.0  # over output tokens, as OpenAI defines it
    repetition_penalty: float = 1.0  # 1: none; over prompt and output tokens, as in transformers
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] = ()  # no others; empty: all
    bad_words: Sequence[str] = ()  # not said, at the beginning of a word or within one
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # the same as token ids; of Python callers only
    structured_outputs: StructuredOutputs | None = None  # what the text must look like
    thinking_budget: ThinkingBudget | None = None  # after how many tokens reasoning is ended
    logprobs: int | None = None  # alternatives per token; 0: the sampled token's alone
    prompt_logprobs: int | None = None  # alternatives per prompt token after the first
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[int, ...] = ()  # in the text even so; of Python callers only
    detokenize: bool = True  # False: token ids alone, no text; of Python callers only
    output_kind: Literal["delta", "final_only"] = "delta"  # final_only: one output, at the end

    def __post_init__(self) -> None:
        stated = _check_types(self)
        if stated.keys() & KEPT_LISTS:
            _keep_tuples(self, KEPT_LISTS)
        for name, numbers in RANGES.items():
            if name not in stated or (value := stated[name]) is None or numbers.holds(value):
                continue
            asks_of_prompt_alone = name == "max_tokens" and value == 0
            if not asks_of_prompt_alone or self.prompt_logprobs is None:
                raise RequestError(f"{name} must be {numbers.words}, got {value}", param=name)
        if self.max_tokens == 0 and self.n > 1:
            raise RequestError(f"n must be 1 with max_tokens 0, got {self.n}", param="n")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        stops = self.stop_strings
        for name, limit in MAX_ENTRIES.items():
            given = stops if name == "stop" else stated.get(name, ())
            if len(given) > limit:
                raise RequestError(f"{name} must hold at most {limit}, got {len(given)}", name)
        if self.structured_outputs is not None:
            # Both would have it go on where the text is complete and nothing may follow.
            for name, is_given in (
                ("min_tokens", self.min_tokens),
                ("ignore_eos", self.ignore_eos),
            ):
                if is_given:
                    raise RequestError(
                        f"{name} cannot be combined with structured_outputs, which say where the "
                        "text ends",
                        param=name,
                    )
            if self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids cannot be combined with structured_outputs: together they "
                    "may allow nothing",
                    param="allowed_token_ids",
                )
        if self.bad_words or self.bad_words_ids:
            self._check_bad_words()
        if stops:
            self._check_stops(stops)
        for token_id, bias in (self.logit_bias or {}).items():
            if not BIAS_RANGE.holds(bias):
                raise RequestError(
                    f"logit_bias must be {BIAS_RANGE.words}, got {bias} for token {token_id}",
                    param="logit_bias",
                )

    def with_checked(self, **values: Any) -> "SamplingParams":
        """Return a copy with other values, which the caller knows to be right: nothing is checked
        again.
        """
        changed = copy(self)
        for name, value in values.items():
            force_setattr(changed, name, value)
        return changed

    def _check_stops(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise RequestError("stop must not contain an empty string", param="stop")
        if (num_characters := sum(map(len, stops))) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop must hold at most {MAX_STOP_CHARACTERS} characters in all its strings "
                f"together, got {num_characters}",
                param="stop",
            )
        if not self.detokenize:
            raise RequestError("stop strings need detokenize", param="stop")

    def _check_bad_words(self) -> None:
        for word in self.bad_words:
            if not (word.strip() and len(word) <= MAX_BAD_WORD_CHARACTERS):
                raise RequestError(
                    f"bad_words must have 1 to {MAX_BAD_WORD_CHARACTERS} characters that are not "
                    f"all spaces, got {word[: MAX_BAD_WORD_CHARACTERS + 1]!r}",
                    param="bad_words",
                )
        for token_ids in self.bad_words_ids:
            if not 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words_ids must have 1 to {MAX_BAD_WORD_TOKENS} tokens each, "
                    f"got {len(token_ids)}",
                    param="bad_words_ids",
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes what is said next."""
        others = self.frequency_penalty, self.presence_penalty
        return self.repetition_penalty != 1 or others != (0, 0)


# What a caller may ask of an embedding: which hidden states, and what becomes of their vector.
# Knows nothing about models: what one pools by default, and whether its vectors may be cut, is
# known at the engine's door.


Pooling = Literal["mean", "last"]

#: By field, of numbers.
POOLING_RANGES: dict[str, Range] = {
    "dimensions": Range("at least 1", ge=1),
    "truncate_prompt_tokens": Range("-1 (the model's limit) or at least 1", ge=-1, other_than=0),
}


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which one prompt becomes a vector. Raises `RequestError` that names the field.

    States are those after the model's last norm. The vector is cut to `dimensions` first, then
    normalized.
    """

    pooling: Pooling | None = None  # of all tokens, or the last one's; None: as the model was saved
    normalize: bool = True  # to length 1
    dimensions: int | None = None  # only of models that were trained to be cut (Matryoshka)
    truncate_prompt_tokens: int | None = None  # tokens kept, the last ones; -1: the model's limit

    def __post_init__(self) -> None:
        _check_types(self)
        if self.pooling not in (None, "mean", "last"):
            raise RequestError(f"pooling must be mean or last, got {self.pooling!r}", "pooling")
        for name, numbers in POOLING_RANGES.items():
            value = getattr(self, name)
            if value is not None and not numbers.holds(value):
                raise RequestError(f"{name} must be {numbers.words}, got {value}", param=name)


# How a model recommends to sample its replies: the values of fields that a request leaves open.
# What a request states always wins. Knows ranges; knows no files and no models.


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Recommended values, by the names of `SamplingParams`; None where nothing is recommended."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def fill(self, given: Mapping[str, Any], *, max_tokens: int | None = None) -> SamplingParams:
        """Parameters of a request that states `given`, by the names of `SamplingParams`.

        `max_tokens` is the limit of a request for which neither the request nor the model has one.
        Raises `RequestError` for what the request states.
        """
        recommended = self.recommended
        if max_tokens is not None:
            recommended.setdefault("max_tokens", max_tokens)
        # No recommendation contradicts the request: neither its least length, nor a prompt that is
        # cut to leave room for as many tokens as it asks for.
        limit = recommended.get("max_tokens", 0)
        if given.get("truncate_prompt_tokens") == -1 or given.get("min_tokens", 0) > limit:
            recommended.pop("max_tokens", None)
        return SamplingParams(**recommended | dict(given))

    @property
    def recommended(self) -> dict[str, Any]:
        """The values that there are, by name."""
        names = self.__struct_fields__
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.recommended.items())


NO_DEFAULTS = SamplingDefaults()


def read_defaults(stated: Mapping[str, Any], where: str) -> SamplingDefaults:
    """Return the recommendation in `stated`, by the names of `SamplingParams`; None values are
    ignored.

    Raises `ConfigError` that names `where` and the value that makes no sense.
    """
    try:
        defaults = msgspec.convert(stated, SamplingDefaults)
        defaults.fill({})
    except (msgspec.ValidationError, RequestError) as error:
        raise ConfigError(
            f"{where} recommends invalid sampling: {error}; model.generation_config none ignores it"
        ) from error
    return defaults
