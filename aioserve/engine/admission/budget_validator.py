"""Thinking budgets at the engine's door: the end mark as the tokens that will be forced.

Knows a tokenizer's words. Knows nothing about when a budget is spent.
"""

from collections.abc import Callable, Collection

import msgspec

from aioserve.errors import RequestError
from aioserve.params import MAX_FORCED_TOKENS, SamplingParams


def spell_budget(
    params: SamplingParams,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
) -> SamplingParams:
    """`params` with the tokens of the mark that ends reasoning. Raises `RequestError` if they are
    none, too many, or not allowed.
    """
    budget = params.thinking_budget
    assert budget is not None, "it is given"
    token_ids = encode(budget.text)
    if budget.end not in decode(token_ids):
        _refuse(f"the tokenizer of this model cannot spell {budget.text!r}")
    if len(token_ids) > MAX_FORCED_TOKENS:
        _refuse(
            f"the text that ends reasoning must have at most {MAX_FORCED_TOKENS} tokens, it has "
            f"{len(token_ids)}"
        )
    _check_allowed(token_ids, params.allowed_token_ids)
    budget = msgspec.structs.replace(budget, forced_token_ids=tuple(token_ids))
    return msgspec.structs.replace(params, thinking_budget=budget)


def _check_allowed(token_ids: Collection[int], allowed: Collection[int]) -> None:
    if allowed and (missing := set(token_ids).difference(allowed)):
        _refuse(
            "allowed_token_ids must hold the tokens that end reasoning; they lack "
            + ", ".join(map(str, sorted(missing)))
        )


def _refuse(why: str) -> None:
    raise RequestError(f"thinking_budget cannot be held: {why}", param="thinking_budget")
