"""What a caller may ask of the sampler, and the ranges that make sense.

Knows nothing about models: token ids are checked against a vocabulary at the engine's door.
"""

import sys
from typing import Literal, NamedTuple

import msgspec

from aioserve.errors import RequestError
from aioserve.structured_outputs import StructuredOutputs
from aioserve.thinking_budget import ThinkingBudget

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
        """Whether `value` is in the range. Infinity and NaN never are."""
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
#: Of a value of `logit_bias`.
BIAS_RANGE = Range("between -100 and 100", ge=-100, le=100)
#: By field, of lists: how many entries they hold at most.
MAX_ENTRIES = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "bad_words_ids": 2 * MAX_BAD_WORDS,
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled and when it stops. Raises `RequestError` that names the field.

    The order of operations on a row of logits: repetition, presence and frequency penalties;
    `logit_bias`; stop tokens masked until `min_tokens`; `bad_words`, which are only said where
    nothing else is allowed; all tokens masked that `allowed_token_ids` or `structured_outputs` do
    not allow; temperature; `top_k`; `top_p`; `min_p`.
    """

    n: int = 1  # independent samples of one prompt
    max_tokens: int | None = None  # None: up to the model's limit; 0: prompt_logprobs alone
    truncate_prompt_tokens: int | None = None  # tokens kept, the last ones; -1: leave max_tokens
    min_tokens: int = 0  # tokens before which no EOS, stop token or stop string ends it
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0  # relative to the most likely token
    seed: int | None = None  # same seed, same logits: same tokens, whatever the batch
    stop: str | tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # over output tokens, as OpenAI defines it
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output tokens, as in transformers
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] = ()  # no others; empty: all
    bad_words: tuple[str, ...] = ()  # not said, at the beginning of a word or within one
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # the same as token ids; of Python callers only
    structured_outputs: StructuredOutputs | None = None  # what the text must look like
    thinking_budget: ThinkingBudget | None = None  # after how many tokens reasoning is ended
    logprobs: int | None = None  # alternatives per token; 0: the sampled token's alone
    prompt_logprobs: int | None = None  # the same of each prompt token after the first
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[int, ...] = ()  # in the text even so; of Python callers only
    detokenize: bool = True  # False: token ids alone, no text; of Python callers only
    output_kind: Literal["delta", "final_only"] = "delta"  # final_only: one output, at the end

    def __post_init__(self) -> None:
        for name, numbers in RANGES.items():
            value = getattr(self, name)
            if value is None or numbers.holds(value):
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
        for name, limit in MAX_ENTRIES.items():
            given = self.stop_strings if name == "stop" else getattr(self, name)
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
        self._check_bad_words()
        if not all(self.stop_strings):
            raise RequestError("stop must not contain an empty string", param="stop")
        num_characters = sum(map(len, self.stop_strings))
        if num_characters > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop must hold at most {MAX_STOP_CHARACTERS} characters in all its strings "
                f"together, got {num_characters}",
                param="stop",
            )
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop strings need detokenize", param="stop")
        for token_id, bias in (self.logit_bias or {}).items():
            if not BIAS_RANGE.holds(bias):
                raise RequestError(
                    f"logit_bias must be {BIAS_RANGE.words}, got {bias} for token {token_id}",
                    param="logit_bias",
                )

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
        return self.stop

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0
