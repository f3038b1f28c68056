"""A bound on the reasoning tokens of a reply, and the marks between which a model reasons.

As it is asked for. Knows no tokenizer: the engine's door spells the mark, `runner` forces it.
"""

import msgspec

from aioserve.errors import RequestError

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
