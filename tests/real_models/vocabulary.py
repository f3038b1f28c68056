"""Token ids of a text, by the tables of a GGUF file alone: merges by rank, or pieces by score.

A witness for small texts, written from what llama.cpp and SentencePiece do. Its time is the square
of a word's length.
"""

from itertools import pairwise
from pathlib import Path

import regex
from gguf import GGUFReader

CONTROL, USER_DEFINED = 3, 4  # types of tokens that are never made of pieces
_QWEN2 = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Vocabulary:
    """The tables of one file."""

    def __init__(self, path: Path) -> None:
        fields = GGUFReader(path).fields
        table = {
            name: fields[f"tokenizer.ggml.{name}"].contents()
            for name in ("model", "tokens", "token_type", "scores", "merges")
            if f"tokenizer.ggml.{name}" in fields
        }
        self.tokens: list[str] = table["tokens"]
        self._ids = {token: number for number, token in enumerate(self.tokens)}
        whole = [
            token
            for token, kind in zip(self.tokens, table["token_type"], strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
        alternatives = map(regex.escape, sorted(whole, key=len, reverse=True))
        self._whole = regex.compile(f"({'|'.join(alternatives)})")
        self._is_byte_level = table["model"] == "gpt2"
        if self._is_byte_level:
            self._ranks = {
                "".join(pair): rank
                for rank, pair in reversed(list(enumerate(map(str.split, table["merges"]))))
            }
            self._merges = set(table["merges"])
        else:
            scores: list[float] = table["scores"]
            self._ranks = {token: -scores[number] for token, number in self._ids.items()}

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        for number, part in enumerate(self._whole.split(text)):
            if number % 2:
                found.append(self._ids[part])
            elif self._is_byte_level:
                for word in _QWEN2.findall(part):
                    found += self._of([_LETTERS[byte] for byte in word.encode()])
            else:
                found += self._of(list(part.replace(" ", "▁")))
        return found

    def _of(self, pieces: list[str]) -> list[int]:
        """Join the two neighbours that are joined first, as long as any are."""
        while True:
            pairs = [
                (self._ranks[one + other], place)
                for place, (one, other) in enumerate(pairwise(pieces))
                if one + other in self._ranks
                and (not self._is_byte_level or f"{one} {other}" in self._merges)
            ]
            if not pairs:
                break
            _, place = min(pairs)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        found: list[int] = []
        for piece in pieces:
            if piece in self._ids:
                found.append(self._ids[piece])
            else:
                found += [self._ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return found


def _letters() -> dict[int, str]:
    """The letter for each byte, as GPT-2 has it."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + number) for number, byte in enumerate(hidden)
    }


_LETTERS = _letters()
