"""Log probabilities of token ids, as OpenAI's two formats show them: with strings and bytes.

Knows the tokenizer only by `decode` and `convert_ids_to_tokens`.
"""

import re
from collections.abc import Sequence
from typing import Any

from aioserve.engine.byte_level import REPLACEMENT, spelled_bytes
from aioserve.outputs import TokenLogprobs
from aioserve.server.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Text and bytes of single tokens, looked up once per token id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, list[int]]:
        known = self._known.get(token_id)
        if known is None:
            text = self._tokenizer.decode([token_id])
            known = self._known[token_id] = (text, list(self._bytes(token_id, text)))
        return known

    def text(self, token_id: int) -> str:
        """The token's text; a piece of a character shows as U+FFFD."""
        return self[token_id][0]

    def join(self, token_ids: Sequence[int]) -> str:
        """The text of known token ids, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _bytes(self, token_id: int, text: str) -> bytes:
        if REPLACEMENT not in text:
            return text.encode()
        # A piece of a character: only the vocabulary knows which bytes it stands for.
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        spelled = spelled_bytes(token)
        return text.encode() if spelled is None else spelled


def completion_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
) -> CompletionLogprobs:
    """The format of /v1/completions; `offset` is where the first token's text begins."""
    tokens = [texts.text(token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[item.logprob for item in logprobs],
        top_logprobs=[
            {
                texts.text(i): value
                for i, value in zip(item.top_token_ids, item.top_logprobs, strict=True)
            }
            | {token: item.logprob}  # OpenAI's always holds the sampled token as well
            for token, item in zip(tokens, logprobs, strict=True)
        ],
        text_offset=offsets,
    )


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> ChatLogprobs:
    """The format of /v1/chat/completions."""
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


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = texts[token_id]
    return {"token": text, "logprob": logprob, "bytes": raw}
