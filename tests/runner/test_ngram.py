"""What came after the same words before, against a search through everything."""

import random
import time
from typing import Any

import msgspec
import pytest

from aioserve.features.spec_decode.draft_length import TextDraftLength
from aioserve.features.spec_decode.ngram import MAX_MATCH, NgramDrafter, NgramText
from aioserve.params import SamplingParams
from aioserve.scheduler.output import NewRequestData


def longest(text: list[int], end: list[int], size: int) -> int:
    """In how many tokens some place of `text` agrees with `end`; 0 for less than `size`."""
    best = 0
    for place in range(len(text) - 1):
        length = 0
        while length < min(place + 1, len(end)) and text[place - length] == end[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= size else 0


def test_the_longest_agreement_is_found_wherever_it_is() -> None:
    rng = random.Random(1)
    for size in (1, 2, 3):
        for _ in range(60):
            text, index = [], NgramText(size)
            while len(text) < 40:
                piece = [rng.randrange(3 * size) for _ in range(rng.choice([0, 1, 1, 2, 9]))]
                text += piece
                index.extend(piece)
                end = text[-MAX_MATCH:]
                length, behind = index.find(end)
                # A place may be older than those that are looked at.
                assert length <= longest(text, end, size)
                assert (length > 0) == (longest(text, end, size) > 0)
                if length:
                    assert text[behind - length : behind] == end[-length:]
                    assert 0 < behind < len(text)


def request(token_ids: list[int], num_prompt_tokens: int, salt: str = "") -> NewRequestData:
    return NewRequestData(
        "r", token_ids, num_prompt_tokens, SamplingParams(), frozenset(), [], 0, cache_salt=salt
    )


def guess(drafter: NgramDrafter, row: int) -> list[int]:
    unread: Any = None
    return drafter.guesses([row], [], unread, unread).get(row, [])


def test_outputs_are_remembered_for_others_but_not_across_salts() -> None:
    drafter = NgramDrafter(3, 100, TextDraftLength(4))
    drafter.set(0, request([1, 2, 3], 3))
    drafter.append(0, [10, 11, 12, 13, 14, 15])
    for salt in ("", "mine"):
        drafter.set(1, request([9, 10, 11, 12], 4, salt))
        assert guess(drafter, 1) == []  # the other still runs
        drafter.drop(1, is_finished=False)
    drafter.drop(0, is_finished=True)
    drafter.set(1, request([9, 10, 11, 12], 4))
    assert guess(drafter, 1) == [13, 14, 15]
    drafter.set(2, request([9, 10, 11, 12], 4, "mine"))
    assert guess(drafter, 2) == []
    drafter.append(2, [40, 41, 42, 43])
    drafter.drop(2, is_finished=True)
    drafter.set(2, request([40, 41, 42], 3))
    assert guess(drafter, 2) == []
    drafter.set(2, request([2, 3, 10], 3))
    assert guess(drafter, 2) == []  # a prompt is not an output


def test_the_store_forgets_the_oldest_half() -> None:
    drafter = NgramDrafter(2, 40, TextDraftLength(4))
    for first in range(0, 50, 10):
        drafter.set(0, request([999], 1))
        drafter.append(0, list(range(first, first + 10)))
        drafter.drop(0, is_finished=True)
    known = []
    for first in range(0, 50, 10):
        drafter.set(0, request([first, first + 1], 2))
        known.append(bool(guess(drafter, 0)))
    assert known == [False, False, True, True, True]


def test_what_an_adapter_says_is_no_guess_for_others() -> None:
    drafter = NgramDrafter(2, 40, TextDraftLength(4))
    said = {}
    for name in ("", "a", "b"):
        drafter.set(0, msgspec.structs.replace(request([999], 1), adapter_id=name))
        drafter.append(0, [1, 2, 3, ord(name or "0")])
        drafter.drop(0, is_finished=True)
    for name in ("", "a", "b", "c"):
        drafter.set(0, msgspec.structs.replace(request([2, 3], 2), adapter_id=name))
        said[name] = guess(drafter, 0)
    assert said == {"": [ord("0")], "a": [ord("a")], "b": [ord("b")], "c": []}


class Noted(TextDraftLength):
    """What searches are said to have taken is kept."""

    def __init__(self) -> None:
        super().__init__(4)
        self.seconds: list[float] = []

    def looked(self, seconds: float) -> None:
        self.seconds.append(seconds)
        super().looked(seconds)


def test_waiting_is_no_part_of_what_a_search_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    find = NgramText.find

    def late_find(self: NgramText, end: Any) -> tuple[int, int]:
        time.sleep(0.3)  # as if another thread had the interpreter
        return find(self, end)

    monkeypatch.setattr(NgramText, "find", late_find)
    length = Noted()
    drafter = NgramDrafter(2, 0, length)
    drafter.set(0, request([1, 2, 3, 1, 2], 5, "mine"))
    unread: Any = None
    assert drafter.guesses([0], [], unread, unread) == {0: [3, 1, 2]}
    assert sum(length.seconds) < 0.3


def test_where_the_budget_is_spent_only_texts_are_searched_that_a_policy_asks_for() -> None:
    length = Noted()
    drafter = NgramDrafter(2, 0, length)
    for row in (0, 1):
        drafter.set(row, request([1, 2, 3, 1, 2], 5))
    length.stepped(2, 2, 0.01)
    length.looked(1.0)
    length.stepped(2, 2, 0.01)
    assert drafter.rests()
    length.seconds.clear()
    length.asked = {0: 2}
    assert not drafter.rests()
    unread: Any = None
    assert drafter.guesses([0, 1], [], unread, unread) == {0: [3, 1]}
    assert not length.seconds  # nor is it charged to the budget
