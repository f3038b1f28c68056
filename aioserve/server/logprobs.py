"""Log probabilities of token ids, as OpenAI's two formats show them: with strings and bytes.

Loaded with the first request that asks for some. Says which samples are best.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from aioserve.outputs import RequestOutput, TokenLogprobs
from aioserve.params import SamplingParams
from aioserve.server.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from aioserve.support.tokens import TokenTexts

_LEAST = -9999.0  # JSON knows no infinity; vLLM's


def completion_logprobs(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_logprobs: int,
    offset: int = 0,
    text: str | None = None,
) -> tuple[CompletionLogprobs, int]:
    """Return the format of /v1/completions, and where the next token's text begins.

    `offset` is where the first token's does; `text`, if given, is all of it, from which special
    tokens may be missing.
    """
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        is_there = text is None or not texts.is_special(token_id)
        if is_there or text.startswith(texts.text(token_id), offset):  # type: ignore[union-attr]
            offset += texts.width(token_id)
    pairs = list(zip(token_ids, logprobs, strict=True))
    told = CompletionLogprobs(
        tokens=[texts.text(token_id) for token_id in token_ids],
        token_logprobs=[None if item is None else max(item.logprob, _LEAST) for item in logprobs],
        top_logprobs=[
            None if item is None else _alternatives(texts, token_id, item, num_logprobs)
            for token_id, item in pairs
        ],
        text_offset=offsets,
    )
    return told, offset


def _alternatives(
    texts: TokenTexts, token_id: int, item: TokenLogprobs, num_logprobs: int
) -> dict[str, float]:
    """Return logprobs by text, or by id where texts are equal; as OpenAI's with the own token."""
    own, named = texts.text(token_id), {}
    alternatives = zip(item.top_token_ids, item.top_logprobs, strict=True)
    for other_id, value in list(alternatives)[:num_logprobs]:
        name = texts.text(other_id)
        if other_id != token_id and (name == own or name in named):
            name = f"token_id:{other_id}"
        named[name] = max(value, _LEAST)
    named[own] = max(item.logprob, _LEAST)
    return named


def prompt_logprobs(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_logprobs: int,
) -> PromptLogprobs:
    """Return the format of vLLM, of a prompt of these tokens."""
    told: PromptLogprobs = []
    for token_id, item in zip(token_ids, logprobs, strict=True):
        if item is None:
            told.append(None)
            continue
        values = [(token_id, item.logprob, item.rank)]
        alternatives = zip(item.top_token_ids, item.top_logprobs, strict=True)
        for rank, (other_id, value) in enumerate(list(alternatives)[:num_logprobs], start=1):
            values.append((other_id, value, rank))
        told.append(
            {
                i: PromptLogprob(logprob=max(value, _LEAST), rank=rank, decoded_token=texts.text(i))
                for i, value, rank in values
            }
        )
    return told


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> ChatLogprobs:
    """Logprobs of sampled tokens in the format of /v1/chat/completions."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                **_entry(texts, token_id, item.logprob),
                top_logprobs=[
                    TopLogprob(**_entry(texts, i, value))
                    for i, value in zip(item.top_token_ids, item.top_logprobs, strict=True)
                ],
            )
            for token_id, item in zip(token_ids, logprobs, strict=True)
        ]
    )


def best_outputs(samples: Sequence[RequestOutput], wanted: SamplingParams) -> list[RequestOutput]:
    """Return the `n` samples of a prompt whose tokens are most likely on average, the best first.

    All come with logprobs; they keep them if those are wanted.
    """

    def mean(output: RequestOutput) -> float:
        values = [entry.logprob for entry in output.logprobs or ()]
        return sum(values) / len(values) if values else -math.inf

    best = sorted(samples, key=mean, reverse=True)[: wanted.n]
    if wanted.logprobs is None:
        best = [msgspec.structs.replace(output, logprobs=None) for output in best]
    return best


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = texts[token_id]
    return {"token": text, "logprob": logprob, "bytes": raw}
