"""Where each row of the persistent batch stands in its grammar, and which tokens may come next.

Masks are made on a thread of their own while the step computes. Knows rows and token ids; knows
nothing about logits, nor how grammars are compiled.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aioserve.errors import GrammarLimitError
from aioserve.runner.attention.backend import IntArray
from aioserve.runner.batch.batch_part import BatchPart
from aioserve.runner.unsound import step_failed
from aioserve.scheduler.output import NewRequestData

if TYPE_CHECKING:
    from aioserve.grammars import GrammarCompiler

logger = logging.getLogger(__name__)

Words = npt.NDArray[np.int32]

_NO_DRAFTS: Mapping[int, Sequence[int]] = {}
MAX_GUESSES = 16  # tokens without a choice that are sent along at a time


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens M of the S rows of a step may take."""

    places: IntArray  # M, among the S
    words: Words  # [M, ceil(V / 32)], a bit per token, the lowest first

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """The masks as booleans [M, V]: True for each token id that a grammar allows."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def of(self, place: int) -> "Masks | None":
        """That of one of the S, as the only one of a step; None if it may take all tokens."""
        own = np.flatnonzero(self.places == place)
        return Masks(np.zeros(1, dtype=np.int64), self.words[own[:1]]) if len(own) else None


class Matcher(Protocol):
    """What is used here of llguidance's `LLMatcher`: a place in a text that is bound."""

    def is_stopped(self) -> bool:
        """Whether nothing but the end may follow."""

    def is_error(self) -> bool:
        """Whether it cannot be followed further."""

    def get_error(self) -> str:
        """Why it cannot be followed further."""

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        """Write the mask of the next token to memory."""

    def compute_ff_tokens(self) -> list[int]:
        """The next tokens, as far as there is no choice."""

    def validate_tokens(self, token_ids: list[int]) -> int:
        """How many of `token_ids` may follow."""

    def consume_tokens(self, token_ids: list[int]) -> bool:
        """Read tokens that are never rolled back; False if they are not allowed."""

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Read tokens that may be rolled back; how many are allowed."""

    def rollback(self, num_tokens: int) -> bool:
        """Take the last tokens back."""


class Standing(NamedTuple):
    """A row that samples and has a matcher."""

    place: int  # among the S
    row: int
    matcher: Matcher
    is_bound: bool  # it needs a mask in this step


class GrammarRows(BatchPart[Matcher]):
    """Matchers by row. `begin`'s future is awaited before `advance`, `set` or `drop`."""

    asked_by = "sampling_params.structured_outputs"

    def __init__(
        self, grammars: "GrammarCompiler | None", vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        super().__init__()
        self._grammars = grammars
        self._num_words = -(-vocab_size // 32)
        self._ahead: dict[int, int] = {}  # guesses that rows have gone ahead
        # By row, of a matcher that binds at times: whether the next tokens, this many, are free.
        self._is_free: dict[int, Callable[[int], bool]] = {}
        self._executor: ThreadPoolExecutor | None = None
        only_eos = np.zeros(self._num_words * 32, dtype=np.bool_)
        only_eos[list(eos_token_ids)] = True
        self._only_eos: Words = np.packbits(only_eos, bitorder="little").view(np.int32)

    def set(self, row: int, request: NewRequestData) -> None:
        wanted = request.sampling_params.structured_outputs
        assert wanted is not None, "`asked_by`"
        assert self._grammars is not None, "the engine's door refuses what cannot be compiled"
        self.rows[row] = self._grammars.matcher(wanted)
        self.advance(row, request.token_ids[request.num_prompt_tokens :])

    def put(self, row: int, matcher: Matcher, is_free: Callable[[int], bool]) -> None:
        """Let `matcher` bind a row from now on, unless `is_free` of the number of next tokens."""
        self.rows[row], self._is_free[row] = matcher, is_free

    def drop(self, row: int, *, is_finished: bool = False) -> None:
        super().drop(row, is_finished=is_finished)
        self._is_free.pop(row, None)

    def begin(self, rows: IntArray, drafts: Mapping[int, Sequence[int]]) -> "Future[Masks] | None":
        """Start the masks of the S `rows`; None if none of them has a grammar.

        A row stands there once, and once more for each of its `drafts`, one after the other.
        """
        if not self.rows:
            return None
        places = [each.place for each in self.standing(rows, drafts) if each.is_bound]
        if not places:
            return None
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-masks")
        return self._executor.submit(self._fill, np.array(places), rows[places].tolist(), drafts)

    def standing(
        self, rows: IntArray, drafts: Mapping[int, Sequence[int]] = _NO_DRAFTS
    ) -> list[Standing]:
        """Which of the S `rows` have a matcher: for `catch_up`, when their tokens are known."""
        if not self.rows:
            return []
        return [
            Standing(place, row, self.rows[row], self._is_bound(row, drafts.get(row, ())))
            for place, row in enumerate(rows.tolist())
            if row in self.rows
        ]

    def _is_bound(self, row: int, guesses: Sequence[int]) -> bool:
        is_free = self._is_free.get(row)
        return is_free is None or not is_free(1 + len(guesses))

    def catch_up(self, standing: Sequence[Standing], token_ids: Words) -> None:
        """Advance grammars by the sampled tokens [S], unless another request has the row by now."""
        for place, row, matcher, _ in standing:
            token_id = int(token_ids[place])
            if self.rows.get(row) is matcher and token_id >= 0:  # else the row has failed
                self.advance(row, [token_id])

    def append(
        self, rows: IntArray, token_ids: list[list[int]], drafts: Mapping[int, Sequence[int]]
    ) -> None:
        del drafts
        for row, own in zip(rows.tolist(), token_ids, strict=True):
            self.advance(row, own)

    def advance(self, row: int, token_ids: Sequence[int]) -> None:
        """A row has said so much more. A step that was planned ahead may bring too many."""
        matcher = self.rows.get(row)
        if matcher is None or not token_ids:
            return
        try:
            if not matcher.is_stopped():
                matcher.consume_tokens(list(token_ids))
                self._check(row, matcher)
        except Exception as error:
            self._fail(row, error)

    def guesses(self, row: int) -> list[int]:
        """The next tokens of a row, as far as its grammar leaves no choice of text."""
        matcher = self.rows.get(row)
        try:
            if matcher is None or matcher.is_stopped():
                return []
            token_ids = matcher.compute_ff_tokens()[:MAX_GUESSES]
            self._check(row, matcher)
            return token_ids
        except Exception as error:
            self._fail(row, error)
            return []

    def masks(self, rows: IntArray) -> Masks | None:
        """The tokens that each of M `rows` may say next; None if none of them has a grammar."""
        standing = [each for each in self.standing(rows) if each.is_bound]
        if not standing:
            return None
        words = np.empty((len(standing), self._num_words), dtype=np.int32)
        for each, own in zip(standing, words, strict=True):
            self._fill_row(each.row, each.matcher, own)
        return Masks(np.array([each.place for each in standing]), words)

    def go_ahead(self, row: int, token_id: int) -> bool:
        """Take a guess as said until `come_back`; False if nothing can follow it."""
        matcher = self.rows.get(row)
        if matcher is None:
            return True
        if matcher.is_stopped() or not matcher.try_consume_tokens([token_id]):
            return False
        self._ahead[row] = self._ahead.get(row, 0) + 1
        return not matcher.is_stopped()

    def come_back(self) -> None:
        """Roll all matchers back to before the draft tokens."""
        for row, num_tokens in self._ahead.items():
            self.rows[row].rollback(num_tokens)
        self._ahead.clear()

    def _fail(self, row: int, error: Exception) -> None:
        """A row cannot go on, for what its matcher has raised."""
        logger.error("a grammar could not be followed", exc_info=error)
        self.errors.setdefault(row, step_failed(error))

    def _check(self, row: int, matcher: Matcher) -> None:
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0]
            self.errors.setdefault(row, GrammarLimitError.WORDS + reason)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    # What follows runs on the thread that makes masks.

    def _fill(
        self, places: IntArray, rows: list[int], drafts: Mapping[int, Sequence[int]]
    ) -> Masks:
        words = np.empty((len(rows), self._num_words), dtype=np.int32)
        place = 0
        while place < len(rows):
            row, guesses = rows[place], drafts.get(rows[place], ())
            own = words[place : place + 1 + len(guesses)]
            try:
                self._fill_ahead(row, self.rows[row], own, guesses)
            except Exception as error:
                self._fail(row, error)
                own[:] = self._only_eos
            place += len(own)
        return Masks(places, words)

    def _fill_ahead(self, row: int, matcher: Matcher, words: Words, guesses: Sequence[int]) -> None:
        """The masks of a row, and of what comes behind each of its `guesses`."""
        self._fill_row(row, matcher, words[0])
        num_taken = 0
        for step, token_id in enumerate(guesses, start=1):
            if num_taken == step - 1 and not matcher.is_stopped():
                num_taken += matcher.try_consume_tokens([token_id])
            if num_taken == step:
                self._fill_row(row, matcher, words[step])
            else:  # never looked at: the guess before it is wrong
                words[step] = self._only_eos
        if num_taken:
            matcher.rollback(num_taken)

    def _fill_row(self, row: int, matcher: Matcher, words: Words) -> None:
        if not matcher.is_stopped():  # else the end may follow, and nothing else
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if not matcher.is_error():
                return
        self._check(row, matcher)
        words[:] = self._only_eos
