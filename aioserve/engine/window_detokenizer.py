"""Token ids to text by a tokenizer's own `decode`, over a window of the last tokens.

For tokenizers whose tokens are not bytes, as SentencePiece's. Knows the tokens that are one byte
each. Knows nothing about requests or streams.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import groupby, takewhile
from typing import Any

from aioserve.errors import is_panic
from aioserve.support.tokens import REPLACEMENT

# Tokens of context kept in front of new ones: decoders look back to decide about a space. A UTF-8
# character has at most four bytes, so four byte tokens; one more than that is safe.
CONTEXT_TOKENS = 5
# The window of tokens that is decoded again with every new token; a guess, it only trades the cost
# of a decode against how often the window moves.
WINDOW_TOKENS = 24

_Utf8 = getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoding that never splits a character and loses none.

    All text of `append` and `flush` together is the decoded output. An incomplete character at
    the end is held back until it is complete, or until `flush`.

    Decoders show U+FFFD for each byte of a run of byte tokens that is not whole characters, though
    most of it may be. Such tokens are put together here: what is whole is text, whatever follows.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Sequence[int],
        byte_tokens: Mapping[int, int] | None = None,
    ) -> None:
        """`byte_tokens` has the byte of every token that is one."""
        self._decode = decode
        self._bytes = byte_tokens or {}
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._sent = self._decode(self._window)  # text of the window that needs no sending
        self._utf8 = _Utf8("replace")
        begun = list(takewhile(self._bytes.__contains__, reversed(self._window)))
        self._utf8.decode(bytes(self._bytes[token_id] for token_id in reversed(begun)))
        self._is_in_bytes = bool(begun)  # the last token is a byte, and its character may go on
        self._is_shown = bool(self._utf8.getstate()[0])  # the prompt's text has a U+FFFD for it

    def append(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        if not self._bytes:
            return self._append_others(token_ids)
        return "".join(
            self._append_bytes(list(tokens)) if are_bytes else self._append_others(list(tokens))
            for are_bytes, tokens in groupby(token_ids, self._bytes.__contains__)
        )

    def _append_bytes(self, token_ids: list[int]) -> str:
        held = "" if self._is_in_bytes else self.flush()
        self._is_in_bytes = True
        self._window = [*self._window, *token_ids][-CONTEXT_TOKENS:]
        return held + self._decode_bytes(bytes(map(self._bytes.__getitem__, token_ids)))

    def _decode_bytes(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if text and self._is_shown:
            self._is_shown = False
            return text.removeprefix(REPLACEMENT)
        return text

    def _append_others(self, token_ids: Sequence[int]) -> str:
        broken = ""
        if self._is_in_bytes:
            broken = self.flush()
            self._is_in_bytes = False
            self._sent = self._decode(self._window)
        self._window += token_ids
        text = self._decode(self._window).removesuffix(REPLACEMENT)
        delta = self._take(text)
        # However it ends: where each token leaves a character open, the window moves as well.
        if len(self._window) > WINDOW_TOKENS and len(self._sent) == len(text):
            self._window = self._window[-CONTEXT_TOKENS:]
            self._sent = self._decode(self._window).removesuffix(REPLACEMENT)
        return broken + delta

    def flush(self) -> str:
        """Return what was held back, now that nothing more comes."""
        if self._is_in_bytes:
            return self._decode_bytes(b"", final=True)
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


def byte_tokens(tokenizer: Any) -> dict[int, int]:
    """By token id: the byte, where a tokenizer spells characters beyond its vocabulary so (byte
    fallback, as SentencePiece has it). Empty if its decoder does not put them together.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    to_id = tokenizer.convert_tokens_to_ids if backend is None else backend.token_to_id
    found = {to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    decode = make_decode(tokenizer, ())
    if (
        len(found) < 256
        or decode([token_id for token_id, byte in found.items() if byte == 65]) != "A"
    ):
        return {}
    return found


def make_decode(tokenizer: Any, skipped: Collection[int]) -> Callable[[list[int]], str]:
    """Return the cheapest way to decode with a `transformers` tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return partial(_decoded, backend.decode, skipped)
    return lambda ids: str(
        tokenizer.decode(
            [i for i in ids if i not in skipped],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
    )


def _decoded(decode: Callable[..., str], skipped: Collection[int], ids: list[int]) -> str:
    """Raises `RuntimeError` where the library panics, which is a fault of this text alone."""
    try:
        return str(decode([i for i in ids if i not in skipped], False))
    except BaseException as error:
        if not is_panic(error):
            raise
        raise RuntimeError(f"the tokenizer cannot write tokens: {error}") from error
