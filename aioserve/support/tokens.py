"""What single tokens stand for: their bytes and texts, whatever the tokenizer.

GPT-2's alphabet is that by which byte-level vocabularies spell bytes. Knows nothing about texts of
several tokens: `engine.detokenizer` decodes those.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no character (yet)


def _alphabet() -> dict[str, int]:
    """GPT-2's table of printable stand-ins for the 256 bytes, inverted."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF_CHAR = _alphabet()


def spelled_bytes(token: str) -> bytes | None:
    """Return the bytes that a token of a byte-level vocabulary spells; None if it is not spelled
    so.
    """
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return None


# Byte-level vocabularies, and the byte tokens of SentencePiece.

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes(dict[int, bytes]):
    """A mapping from a token id to its bytes, special tokens with their text. It is filled as it is
    asked.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Make an empty map for a tokenizer of `transformers`."""
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        return self.note(token_id, str(self._tokenizer.decode([token_id])))

    def note(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that decodes to `text`."""
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


class TokenTexts:
    """Text and bytes of single tokens, looked up once per token id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        self.bytes = TokenBytes(tokenizer)  # by token id

    def __getitem__(self, token_id: int) -> tuple[str, list[int]]:
        known = self._known.get(token_id)
        if known is None:
            text = self._tokenizer.decode([token_id])
            known = self._known[token_id] = (text, list(self.bytes.note(token_id, text)))
        return known

    def text(self, token_id: int) -> str:
        """Return the token's text; a piece of a character shows as U+FFFD."""
        return self[token_id][0]

    @cached_property
    def _special(self) -> set[int]:
        added = self._tokenizer.added_tokens_decoder
        return {token_id for token_id, token in added.items() if token.special}

    def width(self, token_id: int) -> int:
        """Return the characters that begin in the token."""
        return sum(byte & 0xC0 != 0x80 for byte in self[token_id][1])

    def is_special(self, token_id: int) -> bool:
        """Return whether texts may leave the token out."""
        return token_id in self._special

    def join(self, token_ids: Sequence[int]) -> str:
        """Return the text of known token ids, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
