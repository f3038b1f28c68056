"""Token ids to text, a few at a time, and the search for stop strings in it.

Knows the tokenizer's `decode`; `byte_level` is the quick way where it is known to be right. Knows
nothing about requests or streams.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from aioserve.byte_alphabet import REPLACEMENT
from aioserve.engine.delivery.byte_level import (
    ByteLevelDetokenizer,
    prove_token_pieces,
    special_token_ids,
)

# Tokens of context kept in front of new ones: decoders look back to decide about a space. A UTF-8
# character has at most four bytes, so four byte tokens; one more than that is safe.
CONTEXT_TOKENS = 5
# The window of tokens that is decoded again with every new token; a guess, it only trades the cost
# of a decode against how often the window moves.
WINDOW_TOKENS = 24

#: From a prompt's token ids, what makes text of those that follow.
MakeDetokenizer = Callable[[Sequence[int]], "Detokenizer | ByteLevelDetokenizer"]


class DetokenizerChoice:
    """The quickest detokenizer of a tokenizer that is exact, which is proven once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces = prove_token_pieces(tokenizer)

    def choose(self, *, skip_special_tokens: bool, kept: Collection[int] = ()) -> MakeDetokenizer:
        """What shows special tokens or skips them, but for those that are `kept`."""
        special = special_token_ids(self._tokenizer) if skip_special_tokens else frozenset()
        skipped = special.difference(kept)
        if self._pieces is not None:
            return partial(ByteLevelDetokenizer, self._pieces.without(skipped))
        return partial(Detokenizer, _make_decode(self._tokenizer, skipped))


def _make_decode(tokenizer: Any, skipped: Collection[int]) -> Callable[[list[int]], str]:
    """The cheapest way to decode with a `transformers` tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        decode = backend.decode
        return lambda ids: str(decode([i for i in ids if i not in skipped], False))
    return lambda ids: str(
        tokenizer.decode(
            [i for i in ids if i not in skipped],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
    )


class Detokenizer:
    """Incremental decoding that never splits a character and loses none.

    All text of `append` and `flush` together is the decoded output. An incomplete character at
    the end is held back until it is complete, or until `flush`.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._sent = self._decode(self._window)  # text of the window that needs no sending

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._window += token_ids
        text = self._decode(self._window)
        delta = self._take(text.removesuffix(REPLACEMENT))
        if len(self._window) > WINDOW_TOKENS and len(self._sent) == len(text):
            self._window = self._window[-CONTEXT_TOKENS:]
            self._sent = self._decode(self._window)
        return delta

    def flush(self) -> str:
        """What was held back, now that nothing more comes."""
        return self._take(self._decode(self._window))

    def _take(self, text: str) -> str:
        start = len(self._sent)
        if not text.startswith(self._sent):
            # The prompt ended inside a character that the output has completed.
            start = len(self._sent.rstrip(REPLACEMENT))
        if len(text) <= start:
            return ""
        self._sent = text
        return text[start:]


class StopStringMatcher:
    """Finds stop strings that may span tokens; holds back text that could begin one."""

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool) -> None:
        self._stop_strings = stop_strings
        self._include_stop = include_stop
        self._held = ""

    def append(self, text: str) -> tuple[str, str | None]:
        """`(text to send, the stop string that was found)`; nothing may be sent after a match."""
        text = self._held + text
        matches = [(text.find(s), s) for s in self._stop_strings if s in text]
        if matches:
            position, stop = min(matches, key=lambda match: (match[0], -len(match[1])))
            self._held = ""
            return text[: position + len(stop) if self._include_stop else position], stop
        num_held = max((_overlap(text, s) for s in self._stop_strings), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """What was held back, now that nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
