"""Incremental text equals the text of all tokens; stop strings are found across tokens."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import aioserve
from aioserve.engine.detokenizer import DetokenizerChoice
from aioserve.engine.stop_strings import StopStringMatcher
from aioserve.engine.window_detokenizer import WINDOW_TOKENS, Detokenizer
from tests.slow import examples, mostly_slow

TOKENIZER = Tokenizer.from_file(
    str(Path(aioserve.__file__).parent / "model_source/embedded/tokenizer.json")
)


def decode(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids, skip_special_tokens=True))


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def stream(token_ids: list[int], prompt: list[int], chunk: int = 1) -> list[str]:
    detokenizer = Detokenizer(decode, prompt)
    deltas = [detokenizer.append(token_ids[i : i + chunk]) for i in range(0, len(token_ids), chunk)]
    return [*deltas, detokenizer.flush()]


@given(st.text(max_size=80), st.text(max_size=10), st.integers(1, 4))
@settings(max_examples=examples(25, slow=150), deadline=None)
def test_any_text_comes_out_whole_and_no_character_is_split(
    text: str, prompt: str, chunk: int
) -> None:
    text = text.encode(errors="ignore").decode()
    prompt = prompt.encode(errors="ignore").decode()
    deltas = stream(encode(text), encode(prompt), chunk)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("seed", mostly_slow(range(20), but=range(6)))
def test_random_tokens_give_the_text_of_all_of_them(seed: int) -> None:
    """Most random byte tokens are no characters at all; they must still come out as decoded."""
    rng = random.Random(seed)
    token_ids = [rng.randrange(TOKENIZER.get_vocab_size()) for _ in range(200)]
    assert "".join(stream(token_ids, [])) == decode(token_ids)


def test_a_character_that_the_prompt_began_is_completed_by_the_output() -> None:
    begun = encode("🙂")
    assert len(begun) > 1
    assert "".join(stream([*begun[1:], *encode(" ok")], begun[:1])) == "🙂 ok"


def test_an_incomplete_character_is_held_back_until_the_end() -> None:
    *most, last = encode("🙂")
    detokenizer = Detokenizer(decode, encode("a"))
    assert [detokenizer.append([token_id]) for token_id in most] == [""] * len(most)
    assert detokenizer.append([last]) == "🙂"
    detokenizer = Detokenizer(decode, encode("a"))
    detokenizer.append(most)
    assert detokenizer.flush() == "\ufffd"


class ByteFallback:
    """A tokenizer as SentencePiece writes it, with a few words: other characters are bytes."""

    def __init__(self) -> None:
        words = ["▁", "a", "▁ok", "\ufffd", "é"]
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
        vocabulary |= {word: 256 + number for number, word in enumerate(words)}
        self.backend_tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        self.backend_tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )

    def encode(self, text: str) -> list[int]:
        return list(self.backend_tokenizer.encode(text).ids)

    def stream(self, token_ids: list[int], prompt: list[int], chunk: int = 1) -> list[str]:
        make = DetokenizerChoice(self).choose(skip_special_tokens=True)
        detokenizer = make(prompt)
        pieces = [token_ids[i : i + chunk] for i in range(0, len(token_ids), chunk)]
        return [*map(detokenizer.append, pieces), detokenizer.flush()]


FALLBACK = ByteFallback()


@given(st.text("a€🙂é中", max_size=40), st.text("a€🙂", max_size=6), st.integers(1, 4))
@settings(max_examples=examples(25, slow=150), deadline=None)
def test_characters_in_byte_tokens_come_out_whole_and_once(
    text: str, prompt: str, chunk: int
) -> None:
    """Decoders show a U+FFFD for each byte of a character that is not complete yet."""
    deltas = FALLBACK.stream(FALLBACK.encode(text), FALLBACK.encode(prompt), chunk)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_byte_tokens_that_are_no_character_are_shown_where_they_are() -> None:
    euro, word = FALLBACK.encode("€"), [FALLBACK.backend_tokenizer.token_to_id("▁ok")]
    assert "".join(FALLBACK.stream([*euro, *euro[:2], *word, *euro], [])) == "€\ufffd ok€"
    assert "".join(FALLBACK.stream([*euro, *euro[:2]], word)) == "€\ufffd"
    assert "".join(FALLBACK.stream([*euro[2:], *word], euro[:2])) == "€ ok"
    assert "".join(FALLBACK.stream(word, euro[:2])) == " ok"  # the prompt's text has shown it
    unknown = FALLBACK.encode("\ufffd")
    assert "".join(FALLBACK.stream([*unknown, *euro, *unknown], [])) == "\ufffd€\ufffd"


@pytest.mark.parametrize("said", ["\ufffd", "byte 255"])
def test_a_token_costs_the_same_however_long_no_character_was_complete(said: str) -> None:
    tokenizer, asked = FALLBACK.backend_tokenizer, []

    def decode(token_ids: list[int]) -> str:
        asked.append(len(token_ids))
        return str(tokenizer.decode(token_ids))

    detokenizer = Detokenizer(decode, [])
    token_ids = FALLBACK.encode(said) if said == "\ufffd" else [255]
    text = "".join(detokenizer.append(token_ids) for _ in range(500)) + detokenizer.flush()
    assert text == "\ufffd" * 500
    assert max(asked) <= WINDOW_TOKENS + 1


def match(text: str, stops: list[str], chunk: int, include: bool = False) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops, include_stop=include)
    sent = ""
    for i in range(0, len(text), chunk):
        delta, stop = matcher.append(text[i : i + chunk])
        sent += delta
        if stop is not None:
            return sent, stop
    return sent + matcher.flush(), None


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_text_ends_before_the_first_stop_string_however_it_arrives(
    text: str, stops: list[str], chunk: int
) -> None:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    sent, stop = match(text, stops, chunk)
    if not ends:
        assert (sent, stop) == (text, None)
        return
    assert stop in stops
    assert not any(s in sent for s in stops)
    assert text.startswith(sent + str(stop))


def test_the_stop_string_itself_is_sent_only_if_asked() -> None:
    assert match("hello world", [" wor"], 1) == ("hello", " wor")
    assert match("hello world", [" wor"], 1, include=True) == ("hello wor", " wor")


def test_text_that_only_begins_like_a_stop_string_is_not_lost() -> None:
    assert match("a STO b ST", ["STOP"], 1) == ("a STO b ST", None)


def naive_match(text: str, stops: list[str], chunk: int, include: bool) -> list[tuple[str, object]]:
    """What is sent with each piece, by comparing all that is held with all that it may begin."""
    told: list[tuple[str, object]] = []
    held = ""
    for i in range(0, len(text), chunk):
        held += text[i : i + chunk]
        found = [(held.find(stop), -len(stop), stop) for stop in stops if stop in held]
        if found:
            begin, _, stop = min(found)
            return [*told, (held[: begin + len(stop) if include else begin], stop)]
        ends = [n for stop in stops for n in range(len(stop)) if held.endswith(stop[:n])]
        cut = len(held) - max(ends)
        told.append((held[:cut], None))
        held = held[cut:]
    return [*told, (held, None)]


@given(
    st.text("ab", max_size=60),
    st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=4),
    st.integers(1, 7),
    st.booleans(),
)
@settings(max_examples=examples(150, slow=500), deadline=None)
def test_stop_strings_are_found_and_held_back_as_by_comparing_everything(
    text: str, stops: list[str], chunk: int, include: bool
) -> None:
    matcher = StopStringMatcher(stops, include_stop=include)
    told: list[tuple[str, object]] = []
    for i in range(0, len(text), chunk):
        told.append(matcher.append(text[i : i + chunk]))
        if told[-1][1] is not None:
            assert matcher.flush() == ""
            break
    else:
        told.append((matcher.flush(), None))
    assert told == naive_match(text, stops, chunk, include)


class Counted(str):
    """A stop string that counts how often a character of it is looked at."""

    looks = 0

    def __getitem__(self, place: Any) -> str:
        found = super().__getitem__(place)
        Counted.looks += len(found)
        return found


@pytest.mark.parametrize("length", [100, 1000])
@pytest.mark.parametrize(
    "stop", ["a" * 2000 + "z", "a" * 50 + "z", "ab" * 25 + "z", "a" * 30 + "b" + "a" * 30 + "c"]
)
def test_a_character_costs_the_same_however_much_text_is_held_back(stop: str, length: int) -> None:
    text = (stop[:-1] * length)[:length]
    matcher, Counted.looks = StopStringMatcher([Counted(stop)], include_stop=False), 0
    for char in text:
        matcher.append(char)
    assert Counted.looks <= 6 * length  # at most two for each, and as many to know where to go on
