"""Thinking budgets in the batch: a matcher that lets all tokens pass until it forces the end mark.

It stands among the grammars' matchers, before the one of the same row if there is one, so masks,
drafts and steps that are repeated treat it as a grammar. Knows token ids; knows nothing of logits.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from aioserve.features.grammars.rows import GrammarRows, Matcher
from aioserve.runner.batch.input_batch import BatchPart
from aioserve.scheduler.output import NewRequestData
from aioserve.support.reasoning_tokens import PROMPT_END_TOKENS, ReasoningTokens, TokensState

if TYPE_CHECKING:
    from aioserve.features.grammars import GrammarCompiler

# Tokens that may have been sampled and not read when it is asked whether a mask is needed: steps of
# a card are launched before the tokens of the last one are known.
UNREAD_TOKENS = 2


class ThinkingRows(BatchPart[None]):
    """The part of the batch that puts a matcher into the rows whose requests have a thinking
    budget; it has no `rows`.
    """

    asked_by = "sampling_params.thinking_budget"

    def __init__(self, grammars: "GrammarCompiler | None", rows: GrammarRows) -> None:
        super().__init__()
        self._compiler, self._grammars = grammars, rows

    def set(self, row: int, request: NewRequestData) -> None:
        budget = request.sampling_params.thinking_budget
        assert budget is not None, "`asked_by`"
        assert self._compiler is not None, "the engine's door refuses what cannot be held"
        prompt, said = np.split(np.asarray(request.token_ids), [request.num_prompt_tokens])
        tokens = ReasoningTokens(
            budget, self._compiler.token_bytes, prompt[-PROMPT_END_TOKENS:].tolist()
        )
        limit, forced = budget.max_tokens, budget.forced_token_ids
        matcher = BudgetMatcher(tokens, limit, forced, self._grammars.rows.get(row))
        matcher.follow(said.tolist())
        self._grammars.put(row, matcher, matcher.is_free)


class BudgetMatcher:
    """A place of one row in its reasoning, in the words of llguidance's `LLMatcher`.

    After `limit` reasoning tokens, the tokens `forced` are all that may follow, one by one; the
    rest, and the grammar `inner` always, has its own say.
    """

    def __init__(
        self, tokens: ReasoningTokens, limit: int, forced: Sequence[int], inner: Matcher | None
    ) -> None:
        """`inner` has read what the row has said; `tokens` has not."""
        self._tokens, self._limit, self._forced, self._inner = tokens, limit, forced, inner
        self._last: tuple[int, ...] = ()  # token ids with which the mark may have begun
        #: In `forced`, of the token that must follow; None if any may.
        self._place = self._begun_place()
        # States before tokens that may be rolled back.
        self._saved: list[tuple[TokensState, tuple[int, ...], int | None]] = []

    def is_free(self, num_tokens: int) -> bool:
        """Return whether each of the next `num_tokens` may be any token."""
        if self._inner is not None or self._place is not None:
            return False
        return (
            self._tokens.is_over or self._tokens.count + num_tokens + UNREAD_TOKENS <= self._limit
        )

    def follow(self, token_ids: Sequence[int]) -> None:
        """Read tokens that the inner grammar knows."""
        for token_id in token_ids:
            self._tokens.append(token_id)
            self._last = (*self._last, token_id)[max(0, len(self._last) + 2 - len(self._forced)) :]
            place, forced = self._place, self._forced
            if place is not None and place + 1 < len(forced) and token_id == forced[place]:
                self._place = place + 1  # what has to follow the end mark is forced as well
            else:
                self._place = self._begun_place()

    def _begun_place(self) -> int | None:
        """Return the place in `forced` where the end mark goes on, if it is due; None if it
        is not.
        """
        tokens, forced = self._tokens, self._forced
        if not tokens.is_inside or tokens.count < self._limit:
            return None
        # The model may have begun the mark by itself.
        ends = range(min(len(self._last), len(forced) - 1), 0, -1)
        return next((n for n in ends if self._last[-n:] == tuple(forced[:n])), 0)

    def _next(self) -> int | None:
        """Return the token that is forced now; a grammar that forbids it wins."""
        if self._place is None:
            return None
        token_id = self._forced[self._place]
        is_allowed = self._inner is None or self._inner.validate_tokens([token_id]) == 1
        return token_id if is_allowed else None

    # As `LLMatcher`.

    def is_stopped(self) -> bool:
        """Return whether nothing but the end may follow."""
        return self._inner is not None and self._inner.is_stopped()

    def is_error(self) -> bool:
        """Return whether the inner grammar cannot be followed further."""
        return self._inner is not None and self._inner.is_error()

    def get_error(self) -> str:
        """Return why the inner grammar cannot be followed further."""
        return "" if self._inner is None else self._inner.get_error()

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        """Write the mask of the next token, of `num_bytes` bytes in words of 32 bits, to memory."""
        words = np.ctypeslib.as_array((ctypes.c_uint32 * (num_bytes // 4)).from_address(pointer))
        token_id = self._next()
        if token_id is not None:
            words[:] = 0
            words[token_id // 32] = 1 << token_id % 32
        elif self._inner is None:
            words[:] = 0xFFFFFFFF
        else:
            self._inner.unsafe_compute_mask_ptr(pointer, num_bytes)

    def compute_ff_tokens(self) -> list[int]:
        """Return the next tokens, as far as there is no choice."""
        if self._next() is not None:
            return list(self._forced[self._place :])
        return [] if self._inner is None else self._inner.compute_ff_tokens()

    def validate_tokens(self, token_ids: list[int]) -> int:
        """Return how many of `token_ids` may follow."""
        num_taken = 0
        while num_taken < len(token_ids) and self.try_consume_tokens([token_ids[num_taken]]):
            num_taken += 1
        if num_taken:
            self.rollback(num_taken)
        return num_taken

    def consume_tokens(self, token_ids: list[int]) -> bool:
        """Read tokens that are never rolled back; False if the grammar does not allow them."""
        self._saved.clear()
        is_allowed = self._inner is None or self._inner.consume_tokens(token_ids)
        self.follow(token_ids)
        return is_allowed

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Read tokens that may be rolled back, up to the first that is not allowed; how many."""
        for num_taken, token_id in enumerate(token_ids):
            forced = self._next()
            if forced is not None and token_id != forced:
                return num_taken
            if self._inner is not None and not self._inner.try_consume_tokens([token_id]):
                return num_taken
            self._saved.append((self._tokens.save(), self._last, self._place))
            self.follow([token_id])
        return len(token_ids)

    def rollback(self, num_tokens: int) -> bool:
        """Undo the last `num_tokens` tokens."""
        if self._inner is not None:
            self._inner.rollback(num_tokens)
        state, self._last, self._place = self._saved[-num_tokens]
        self._tokens.restore(state)
        del self._saved[-num_tokens:]
        return True
