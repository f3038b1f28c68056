"""Token ids to text, a few at a time.

Knows the tokenizer's `decode`, and the tokens that are one byte each; byte-level BPE has a quick
way of its own, where that is known to be right. Knows nothing about requests or streams.
"""

import random
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, takewhile
from typing import Any

from aioserve.errors import is_panic
from aioserve.support.tokens import REPLACEMENT, spelled_bytes

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
        self._bytes = {} if self._pieces is not None else _byte_tokens(tokenizer)

    def choose(self, *, skip_special_tokens: bool, kept: Collection[int] = ()) -> MakeDetokenizer:
        """Return what shows special tokens or skips them, but for those that are `kept`."""
        special = special_token_ids(self._tokenizer) if skip_special_tokens else frozenset()
        skipped = special.difference(kept)
        if self._pieces is not None:
            return partial(ByteLevelDetokenizer, self._pieces.without(skipped))
        decode = _make_decode(self._tokenizer, skipped)
        return partial(Detokenizer, decode, byte_tokens=self._bytes)


def _byte_tokens(tokenizer: Any) -> dict[int, int]:
    """By token id: the byte, where a tokenizer spells characters beyond its vocabulary so (byte
    fallback, as SentencePiece has it). Empty if its decoder does not put them together.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    to_id = tokenizer.convert_tokens_to_ids if backend is None else backend.token_to_id
    found = {to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    decode = _make_decode(tokenizer, ())
    if (
        len(found) < 256
        or decode([token_id for token_id, byte in found.items() if byte == 65]) != "A"
    ):
        return {}
    return found


def _make_decode(tokenizer: Any, skipped: Collection[int]) -> Callable[[list[int]], str]:
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


# Byte-level BPE: a token is bytes, whatever its neighbours are, so no token is decoded twice. Knows
# UTF-8, and proves that a tokenizer decodes by bytes alone. Knows nothing about requests or
# streams.


# Tokens of the prompt in which an unfinished character may have begun: it has at most three bytes.
PROMPT_TOKENS = 5
# What is compared with the tokenizer's own decoder before the table is trusted; random tokens hold
# every kind of broken character. It takes 5 ms; how many are enough is a guess.
NUM_SAMPLES, SAMPLE_TOKENS = 100, 20

_Utf8 = getincrementaldecoder("utf-8")


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens of a `transformers` tokenizer that `skip_special_tokens` means."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


class TokenPieces(dict[int, str | bytes]):
    """A mapping from a token id to its text, or to its bytes if they are not whole characters. It
    is filled as it is asked.
    """

    def __init__(
        self, id_to_token: Callable[[int], str | None], skipped: Collection[int] = ()
    ) -> None:
        """Tokens that are `skipped` have no text."""
        super().__init__()
        self._id_to_token = id_to_token
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._id_to_token(token_id)
        piece: str | bytes = ""  # of ids without a token, too: models pad their vocabularies
        if token is not None and token_id not in self._skipped:
            spelled = spelled_bytes(token)
            piece = token.encode() if spelled is None else spelled
            with suppress(UnicodeDecodeError):  # it may be a part of a character
                piece = piece.decode()
        self[token_id] = piece
        return piece

    def without(self, skipped: Collection[int]) -> "TokenPieces":
        """Return the table of the same tokenizer in which the `skipped` tokens have no text."""
        pieces = TokenPieces(self._id_to_token, skipped)
        pieces.update((i, piece) for i, piece in self.items() if i not in skipped)
        return pieces

    def join(self, token_ids: Iterable[int]) -> bytes:
        """Return the UTF-8 bytes of the text of `token_ids`; those of skipped tokens are left
        out.
        """
        pieces = (self[token_id] for token_id in token_ids)
        return b"".join(p.encode() if isinstance(p, str) else p for p in pieces)


def prove_token_pieces(tokenizer: Any) -> TokenPieces | None:
    """Return the table of a byte-level tokenizer of `transformers`; None for any other.

    Its decoder has to say that it is one, and to agree on every added token and random ones.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return None
    pieces = TokenPieces(backend.id_to_token)
    rng, vocab_size = random.Random(0), backend.get_vocab_size()
    samples = [
        [rng.randrange(vocab_size) for _ in range(SAMPLE_TOKENS)] for _ in range(NUM_SAMPLES)
    ]
    samples.append(list(backend.get_added_tokens_decoder()))
    for sample in samples:
        text = ByteLevelDetokenizer(pieces, ())
        if text.append(sample) + text.flush() != backend.decode(sample, False):
            return None
    return pieces


class ByteLevelDetokenizer:
    """A `Detokenizer` that looks the text of tokens up in a table."""

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._decoder = _Utf8("replace")
        self._is_split = False  # the decoder holds the beginning of a character
        self._decode(pieces.join(prompt_token_ids[-PROMPT_TOKENS:]))
        # Where the prompt ends in a broken character, its own text ends in this many U+FFFD.
        self._num_shown = self._decoder.getstate()[0].decode(errors="replace").count(REPLACEMENT)

    def append(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        if len(token_ids) == 1 and not self._is_split:
            piece = self._pieces[token_ids[0]]
            if isinstance(piece, str):
                return piece
        return self._take(self._decode(self._pieces.join(token_ids)))

    def flush(self) -> str:
        """Return what was held back, now that nothing more comes."""
        return self._take(self._decode(b"", final=True)) if self._is_split else ""

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        self._is_split = bool(self._decoder.getstate()[0])
        return text

    def _take(self, text: str) -> str:
        if text and self._num_shown:  # gone if the output has completed the character
            is_shown = text.startswith(REPLACEMENT * self._num_shown)
            text = text[self._num_shown if is_shown else 0 :]
            self._num_shown = 0
        return text
