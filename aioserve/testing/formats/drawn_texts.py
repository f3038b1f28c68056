"""Texts that a grammar allows, drawn at random, byte by byte.

Knows llguidance's matchers, with a token for each byte. Knows no format but by its marks.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_BYTES = 3000  # of a text


def draw_text(matcher: "LLMatcher", marks: Sequence[str], rng: random.Random) -> str | None:
    """A text that the grammar allows; None if it has not ended in time."""
    text = b""
    while len(text) < MAX_BYTES:
        if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.5):
            return text.decode()
        forced = matcher.compute_ff_bytes()
        piece = forced or _piece(matcher, marks, rng)
        if not piece:
            return text.decode() if matcher.is_accepting() else None
        if forced and not matcher.consume_tokens(list(forced)):
            return None
        text += piece
    return None


def _piece(matcher: "LLMatcher", marks: Sequence[str], rng: random.Random) -> bytes:
    """More text, which the matcher has taken: a mark of the format, or a byte."""
    for mark in rng.sample(marks, len(marks)) if rng.random() < 0.3 else ():
        tokens = list(mark.encode())
        num_taken = matcher.try_consume_tokens(tokens)
        if num_taken == len(tokens):
            return bytes(tokens)
        if num_taken:
            matcher.rollback(num_taken)
    mask = matcher.compute_bitmask()
    allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
    likely = [byte for byte in allowed if byte in b'"}])>,'] if rng.random() < 0.4 else []
    if not allowed:
        return b""
    byte = rng.choice(likely or allowed)
    matcher.consume_tokens([byte])
    return bytes([byte])
