"""Lines that break between words, whatever the pieces are that a reply comes in."""

import random

import pytest

from aioserve.cli.chat import WordWrap


def wrapped(text: str, width: int, sizes: random.Random | None = None) -> str:
    """The text as shown, given in pieces."""
    wrap, shown = WordWrap(width), ""
    while text:
        size = sizes.randint(1, 9) if sizes else len(text)
        shown += wrap.feed(text[:size])
        text = text[size:]
    return shown + wrap.end()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("to be or not to be", "to be or\nnot to be"),
        ("a fine word", "a fine\nword"),
        ("ends in time ", "ends in\ntime"),
        ("one\n  two\n\n three", "one\n  two\n\n three"),
        ("    indent it", "    indent\nit"),
        ("short incomprehensibilities", "short\nincomprehensibilities"),
        ("", ""),
    ],
)
def test_a_word_that_does_not_fit_begins_the_next_line(text: str, shown: str) -> None:
    assert wrapped(text, 10) == shown


def test_wide_characters_break_anywhere_and_count_twice() -> None:
    assert wrapped("\u4f60\u597d" * 4, 10) == "\u4f60\u597d" * 2 + "\u4f60\n\u597d" + "\u4f60\u597d"


def test_accents_take_no_room() -> None:
    assert wrapped("e\u0301" * 10 + " x", 12) == "e\u0301" * 10 + " x"


def test_pieces_make_no_difference_and_no_word_is_lost_or_broken() -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcde", k=rng.randint(1, 12))) for _ in range(300)]
    text = "".join(word + rng.choice([" ", " ", " ", "  ", "\n"]) for word in words)
    whole = wrapped(text, 30)
    assert wrapped(text, 30, random.Random(2)) == whole
    assert whole.split() == words
    assert max(map(len, whole.split("\n"))) <= 30


def test_what_is_no_word_does_not_wait_for_its_end() -> None:
    wrap = WordWrap(10)
    assert wrap.feed("abc") == ""
    assert wrap.feed("defghijkl") == "abcdefghijkl"
