"""How each row of the persistent batch is sampled, as columns; and the part that one step needs.

Begins with random numbers that depend on (seed, position, token id) and on nothing else: a
counter-based hash instead of a stream, so that the number of a token does not depend on the batch,
the row, or what was drawn before. Integers only, so that a GPU kernel can compute the same bits.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.params import SamplingParams
from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.batch.input_batch import BatchPart
from aioserve.runner.interface import step_failed
from aioserve.scheduler.output import NewRequestData

if TYPE_CHECKING:
    from aioserve.runner.batch.logits_edits import LogitsEdits

Words = npt.NDArray[np.uint32]

_GOLDEN = np.uint32(0x9E3779B9)  # 2**32 / golden ratio: keeps small inputs apart


def seed_words(seed: int) -> tuple[int, int]:
    """Return the low and the high 32 bits of a signed or unsigned 64-bit seed."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def row_keys(seeds: Words, positions: npt.NDArray[np.int64]) -> Words:
    """Return two keys per row, [N, 2], from `seeds` [N, 2] and the positions [N] of the sampled
    tokens.

    key0 = mix(mix(mix(low + GOLDEN) ^ high) + position); key1 = mix(key0 + GOLDEN)
    """
    key = seeds[:, 0] + _GOLDEN
    key = mix(mix(key) ^ seeds[:, 1]) + positions.astype(np.uint32)
    key0 = mix(key)
    return np.stack([key0, mix(key0 + _GOLDEN)], axis=1)


def hash_tokens(keys: Words, token_ids: Words) -> Words:
    """mix(mix(token_id + key0) ^ key1) for `keys` [N, 2] and `token_ids` [V] or [N, V]: [N, V]."""
    words = token_ids + keys[:, :1]
    return mix(mix(words) ^ keys[:, 1:])


def mix(words: Words) -> Words:
    """Return a bijective 32-bit mixer, all arithmetic modulo 2**32; changes `words` in place.

    x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16
    Source: "lowbias32", C. Wellons, Prospecting for Hash Functions (2018), public domain.
    """
    shifted = np.right_shift(words, 16)
    words ^= shifted
    words *= np.uint32(0x7FEB352D)
    words ^= np.right_shift(words, 15, out=shifted)
    words *= np.uint32(0x846CA68B)
    words ^= np.right_shift(words, 16, out=shifted)
    return words


def uniform(words: Words) -> npt.NDArray[np.float32]:
    """Hash words as numbers in (0, 1): (top 23 bits + 0.5) / 2**23, exact in float32."""
    return ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)


# Columns. They know rows and numbers; nothing about models or about how a token is chosen.


logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]

NO_LOGPROBS = -1
# The smallest number that float32 holds in full precision. What is smaller, and not 0, is taken for
# it: rounded to 0, a temperature or a top-p would mean something else.
SMALLEST = float(np.finfo(np.float32).tiny)


class Column(NamedTuple):
    """The type and the values of a column that follows from the parameters of a row's request."""

    dtype: type[np.generic]
    neutral: Any  # the value of a row that asks for nothing, a number or one of several words
    #: The value of a request, from its parameters and the size of the vocabulary.
    value: Callable[[SamplingParams, int], Any]


def _column(
    dtype: type[np.generic], neutral: Any, value: Callable[[SamplingParams, int], Any]
) -> dict[str, Column]:
    return {"column": Column(dtype, neutral, value)}


@dataclass(frozen=True)
class SamplingInputs:
    """Columns of the S rows that sample in one step. A parameter's column is declared here, and
    nowhere else.
    """

    num_tokens: IntArray  # S, known before this step's token, i.e. the position of that token
    edits: "dict[int, LogitsEdits]"  # by place among the S, for those that have any
    temperature: FloatArray = field(  # S, 0 = greedy
        metadata=_column(
            np.float32,
            0,
            lambda params, _: params.temperature and max(params.temperature, SMALLEST),
        )
    )
    top_k: IntArray = field(  # S, 0 = all
        metadata=_column(np.int64, 0, lambda params, size: min(max(params.top_k, 0), size))
    )
    top_p: FloatArray = field(  # S
        metadata=_column(np.float32, 1, lambda params, _: max(params.top_p, SMALLEST))
    )
    min_p: FloatArray = field(metadata=_column(np.float32, 0, lambda params, _: params.min_p))  # S
    seeds: npt.NDArray[np.uint32] = field(  # [S, 2], low and high word
        metadata=_column(np.uint32, (0, 0), lambda params, _: seed_words(params.seed or 0))
    )
    num_logprobs: IntArray = field(  # S, NO_LOGPROBS = not asked
        metadata=_column(
            np.int64,
            NO_LOGPROBS,
            lambda params, _: NO_LOGPROBS if params.logprobs is None else params.logprobs,
        )
    )

    @classmethod
    def neutral(cls, num_rows: int) -> "SamplingInputs":
        """Return the columns of rows that ask for nothing, and know no token."""
        columns = {
            name: np.full((num_rows, *np.shape(column.neutral)), column.neutral, column.dtype)
            for name, column in COLUMNS.items()
        }
        return cls(np.zeros(num_rows, dtype=np.int64), {}, **columns)

    @cached_property
    def draws(self) -> tuple[int, ...] | None:
        """Where the columns lie by which the compiled library draws from these rows, for as long as
        this object lives; None: all rows are greedy.
        """
        if not self.temperature.any():
            return None
        columns = self.temperature, self.top_k, self.top_p, self.log_min_p, self.seeds
        return tuple(column.ctypes.data for column in (*columns, self.num_tokens))

    @cached_property
    def log_min_p(self) -> FloatArray:
        """Min-p as a bound on scaled logits, below the best."""
        with np.errstate(divide="ignore"):
            return np.log(self.min_p)

    @cached_property
    def asks_logprobs(self) -> bool:
        """Whether a row wants to be told log probabilities."""
        return bool((self.num_logprobs != NO_LOGPROBS).any())

    def take(self, places: IntArray | npt.NDArray[np.bool_]) -> "SamplingInputs":
        """Return the columns of some of the rows; edits are left behind."""
        columns = [numbers[places] for numbers in _columns_of(self)]
        return SamplingInputs(self.num_tokens[places], {}, *columns)


#: By field of `SamplingInputs`, in their order.
COLUMNS: dict[str, Column] = {
    each.name: each.metadata["column"] for each in fields(SamplingInputs) if each.metadata
}
_columns_of = attrgetter(*COLUMNS)


class SamplingColumns(BatchPart["LogitsEdits"]):
    """One entry per row of the persistent batch; `rows` are those whose logits are edited."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        all_rows = SamplingInputs.neutral(num_rows)
        self._columns: tuple[npt.NDArray[Any], ...] = _columns_of(all_rows)
        values = (column.value for column in COLUMNS.values())
        self._set = tuple(zip(self._columns, values, strict=True))
        self._last: tuple[StepInputs, SamplingInputs] | None = None

    def set(self, row: int, request: NewRequestData) -> None:
        params, vocab_size = request.sampling_params, self._vocab_size
        for numbers, value in self._set:
            numbers[row] = value(params, vocab_size)
        if (
            params.has_penalties
            or params.logit_bias
            or params.min_tokens
            or params.allowed_token_ids
            or params.bad_words_ids
        ):
            from aioserve.runner.batch.logits_edits import LogitsEdits

            self.rows[row] = LogitsEdits(
                params,
                request.stop_token_ids,
                request.token_ids,
                request.num_prompt_tokens,
                self._vocab_size,
            )

    def append(
        self, rows: IntArray, token_ids: list[list[int]], drafts: Mapping[int, Sequence[int]]
    ) -> None:
        del drafts
        for row, own in zip(rows.tolist(), token_ids, strict=True):
            try:
                if row in self.rows:
                    for token_id in own:
                        self.rows[row].append(token_id)
            except Exception as error:
                logger.exception("a token could not be counted")
                self.errors.setdefault(row, step_failed(error))

    def counts_tokens(self, row: int) -> bool:
        """Return whether what a row has said changes what it says next."""
        return row in self.rows and self.rows[row].counts_tokens

    def of(self, inputs: StepInputs) -> SamplingInputs:
        """Return the sampler's inputs for the S rows of a step that sample."""
        if self._last is not None and self._last[0] is inputs:
            return self._last[1]  # of the same rows, and `seq_lens` has other numbers
        if inputs.logits_indices is inputs.sampling and len(inputs.sampling) == len(inputs.rows):
            found = self.select(inputs.rows, inputs.seq_lens)  # of one token each
            self._last = inputs, found
            return found
        num_tokens = inputs.positions[inputs.logits_indices] + 1
        return self.select(inputs.rows[inputs.sampling], num_tokens)

    def select(self, rows: IntArray, num_tokens: IntArray) -> SamplingInputs:
        """Return the sampler's inputs for `rows`, which hold `num_tokens` each."""
        edits = {}
        if self.rows:
            places = enumerate(rows.tolist())
            edits = {place: self.rows[row] for place, row in places if row in self.rows}
        return SamplingInputs(num_tokens, edits, *[numbers[rows] for numbers in self._columns])
