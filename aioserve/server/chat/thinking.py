"""Thinking budgets and reasoning tokens of conversations, for every protocol.

Knows the marks of the model and what a request may ask of them; which fields ask, the routes know.
"""

from collections.abc import Iterable, Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET

from aioserve.errors import RequestError
from aioserve.params import SamplingParams, ThinkingBudget
from aioserve.server.chat.chat_format import CHAT_FORMAT, ChatFormat
from aioserve.server.keys import ENGINE
from aioserve.server.protocol import CompletionTokensDetails, Usage
from aioserve.support.tokens import ReasoningTokens, TokenBytes

UNLIMITED = -1


def with_budget(
    request: web.Request, params: SamplingParams, max_tokens: int | None, field: str
) -> SamplingParams:
    """`params` of a reply that reasons for at most `max_tokens` tokens; None, or -1: any number.

    Raises `RequestError` that names `field` if the model's reasoning is not known, or for fewer.
    """
    if max_tokens is None or max_tokens == UNLIMITED:
        return params
    if max_tokens < UNLIMITED:
        raise RequestError(f"{field} must be at least -1, got {max_tokens}", param=field)
    chat_format = request.app[CHAT_FORMAT]
    marks = chat_format.thinking
    if marks is None:
        raise RequestError(
            f"{field} cannot be held: the chat template of this model shows no reasoning that is "
            "known here (see --reasoning-parser)",
            param=field,
        )
    message = request.app[ENGINE].config.server.reasoning_budget_message
    budget = ThinkingBudget(
        max_tokens=max_tokens,
        start=marks.start,
        end=marks.end,
        is_implied=marks.is_implied,
        is_repeated=marks.is_repeated,
        forced=message + marks.end + chat_format.after_thinking,
    )
    return msgspec.structs.replace(params, thinking_budget=budget)


def reasoning_counter(
    chat_format: ChatFormat, pieces: TokenBytes, prompt_end: Sequence[int]
) -> ReasoningTokens | None:
    """What counts the reasoning tokens of one reply to a prompt with these last tokens; None for a
    model whose reasoning is not known.
    """
    marks = chat_format.thinking
    return None if marks is None else ReasoningTokens(marks, pieces, prompt_end)


def tell_reasoning(usage: Usage, counts: Iterable[int | None]) -> None:
    """Add the reasoning tokens of each choice to `usage`, unless they are not counted."""
    known = [count for count in counts if count is not None]
    details = CompletionTokensDetails(reasoning_tokens=sum(known)) if known else UNSET
    usage.completion_tokens_details = details
