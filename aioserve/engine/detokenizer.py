"""Token ids to text, a few at a time, by the quickest way that is exact for a tokenizer.

Byte-level BPE has a quick way of its own, where that is known to be right; other tokenizers decode
a window (`window_detokenizer`, which is loaded for them). Knows nothing about requests or streams.
"""

import random
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from aioserve.support.tokens import REPLACEMENT, spelled_bytes

if TYPE_CHECKING:
    from aioserve.engine.window_detokenizer import Detokenizer

#: From a prompt's token ids, what makes text of those that follow.
MakeDetokenizer = Callable[[Sequence[int]], "Detokenizer | ByteLevelDetokenizer"]


class DetokenizerChoice:
    """The quickest detokenizer of a tokenizer that is exact, which is proven once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces = prove_token_pieces(tokenizer)
        self._bytes: Mapping[int, int] = {}
        if self._pieces is None:
            from aioserve.engine.window_detokenizer import byte_tokens

            self._bytes = byte_tokens(tokenizer)

    def choose(self, *, skip_special_tokens: bool, kept: Collection[int] = ()) -> MakeDetokenizer:
        """Return what shows special tokens or skips them, but for those that are `kept`."""
        special = special_token_ids(self._tokenizer) if skip_special_tokens else frozenset()
        skipped = special.difference(kept)
        if self._pieces is not None:
            return partial(ByteLevelDetokenizer, self._pieces.without(skipped))
        from aioserve.engine.window_detokenizer import Detokenizer, make_decode

        decode = make_decode(self._tokenizer, skipped)
        return partial(Detokenizer, decode, byte_tokens=self._bytes)


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
        self._num_shown = 0
        for token_id in reversed(prompt_token_ids[-PROMPT_TOKENS:]):
            if last := pieces[token_id]:  # else a special token, as templates end with
                if isinstance(last, str):
                    return  # no character is broken behind whole ones
                break
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
