"""The table of a byte-level tokenizer gives the same text as its own decoder, or is not used."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

import aioserve
from aioserve.engine.detokenizer import (
    ByteLevelDetokenizer,
    TokenPieces,
    prove_token_pieces,
    special_token_ids,
)
from aioserve.support.tokens import REPLACEMENT
from tests.slow import examples

PATH = str(Path(aioserve.__file__).parent / "model_source/embedded/tokenizer.json")


class Wrapped:
    """A tokenizer of `transformers`, as far as it is looked at."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend


def make_tokenizer() -> Tokenizer:
    """The embedded one, with tokens that are not spelled in its alphabet."""
    tokenizer = Tokenizer.from_file(PATH)
    tokenizer.add_tokens(["<\uff5cplain\uff5c>", "naïve", "two words"])
    tokenizer.add_special_tokens([AddedToken("<\uff5cspecial\uff5c>", special=True)])
    return tokenizer


TOKENIZER = make_tokenizer()
BYTES = [TOKENIZER.token_to_id(chr(c)) for c in range(0x100, 0x143)]  # most are no characters
TOKEN_ID = st.one_of(
    st.integers(0, TOKENIZER.get_vocab_size() + 5),
    st.sampled_from([token_id for token_id in BYTES if token_id is not None]),
    st.sampled_from(list(TOKENIZER.get_added_tokens_decoder())),
)


@cache  # the table of a tokenizer is made once, as in a server
def prove(skip: bool, tokenizer: Any = TOKENIZER) -> TokenPieces | None:
    wrapped = Wrapped(tokenizer)
    pieces = prove_token_pieces(wrapped)
    return pieces.without(special_token_ids(wrapped)) if pieces is not None and skip else pieces


@given(st.lists(TOKEN_ID, max_size=40), st.lists(TOKEN_ID, max_size=6), st.integers(1, 3))
@example(token_ids=[], prompt=[173, 98], chunk=1)  # half a surrogate: two bytes, two U+FFFD
@example(token_ids=[98], prompt=[173, 98], chunk=1)
@settings(max_examples=examples(60, slow=500), deadline=None)
@pytest.mark.parametrize("skip", [False, True])
def test_any_tokens_give_what_the_tokenizer_adds_to_the_prompts_text(
    skip: bool, token_ids: list[int], prompt: list[int], chunk: int
) -> None:
    pieces = prove(skip)
    assert pieces is not None
    detokenizer = ByteLevelDetokenizer(pieces, prompt)
    steps = range(0, len(token_ids), chunk)
    deltas = [detokenizer.append(token_ids[i : i + chunk]) for i in steps]
    shown = TOKENIZER.decode(prompt, skip_special_tokens=skip)
    text = TOKENIZER.decode(prompt + token_ids, skip_special_tokens=skip)
    if not text.startswith(shown):  # the output has completed the prompt's last character
        shown = shown.removesuffix(REPLACEMENT)
    assert shown + "".join(deltas) + detokenizer.flush() == text


# Not U+FFFD itself: what is begun of it looks like all of it.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT)


@given(st.text(CHARACTERS, max_size=40))
@settings(deadline=None)
def test_no_character_is_split_and_none_comes_late(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces = prove(False)
    assert pieces is not None
    detokenizer = ByteLevelDetokenizer(pieces, [])
    sent = ""
    for i, token_id in enumerate(token_ids):
        sent += detokenizer.append([token_id])
        begun = TOKENIZER.decode(token_ids[: i + 1], skip_special_tokens=False)
        assert sent == (begun if text.startswith(begun) else begun.removesuffix(REPLACEMENT))
    assert sent == text


def test_the_bytes_of_a_character_come_out_together_or_as_one_replacement() -> None:
    pieces = prove(True)
    assert pieces is not None
    *most, last = TOKENIZER.encode("🙂", add_special_tokens=False).ids
    detokenizer = ByteLevelDetokenizer(pieces, [])
    assert [detokenizer.append([token_id]) for token_id in most] == [""] * len(most)
    assert detokenizer.append([last]) == "🙂"
    assert detokenizer.append(most) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def other_decoder(decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_file(PATH)
    tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=["metaspace", "wordpiece", "sequence"],
)
def test_a_decoder_that_looks_at_neighbours_is_left_to_the_window(decoder: Any) -> None:
    assert prove(True, other_decoder(decoder)) is None


def test_a_decoder_that_only_calls_itself_byte_level_is_found_out() -> None:
    class ByteLevel:
        """Says the right name; what the tokenizer decodes is another matter."""

    class Liar:
        decoder = ByteLevel()

        def __init__(self) -> None:
            self._tokenizer = other_decoder(decoders.Metaspace())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

    assert prove(True, Liar()) is None


def test_a_tokenizer_without_a_fast_backend_is_left_to_the_window() -> None:
    assert prove_token_pieces(object()) is None
