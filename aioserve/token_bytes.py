"""The bytes that a single token stands for, whatever kind of tokenizer has it.

Knows byte-level vocabularies and the byte tokens of SentencePiece. Knows nothing about texts of
several tokens: `engine.delivery` decodes those.
"""

import re
from typing import Any

from aioserve.byte_alphabet import REPLACEMENT, spelled_bytes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes(dict[int, bytes]):
    """By token id: its bytes, special tokens with their text. Filled as asked."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of `transformers`."""
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        return self.note(token_id, str(self._tokenizer.decode([token_id])))

    def note(self, token_id: int, text: str) -> bytes:
        """The bytes of a token that decodes to `text`."""
        found = self[token_id] = self._bytes(token_id, text)
        return found

    def _bytes(self, token_id: int, text: str) -> bytes:
        if REPLACEMENT not in text:
            return text.encode()
        # A piece of a character: only the vocabulary knows which bytes it stands for.
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        spelled = spelled_bytes(token)
        return text.encode() if spelled is None else spelled
