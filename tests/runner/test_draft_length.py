"""Drafts as long as they pay: long where one token more costs little, none where it costs most."""

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.features.spec_decode.draft_length import (
    CLASSES,
    COMPARED_IN,
    LOSS_SHARE,
    MOST_DEBT,
    TRIAL_INTERVAL,
    DraftLength,
    TextDraftLength,
)
from aioserve.features.spec_decode.model_drafter import ModelDraftLength
from tests.slow import examples


def limit(length: DraftLength, name: str, agreed: int | None = None) -> int:
    """The limit of one request; `agreed`: tokens of its text that were found again."""
    known: Any = None if agreed is None else (agreed, length.max_tokens)
    return length.limits({name: known}).get(name, 0)


def learned(num_rows: int, base: float, per_token: float) -> DraftLength:
    """After 40 steps of rows with one to nine tokens each."""
    length = DraftLength(8)
    for number in range(40):
        num_tokens = num_rows * (1 + number % 9)
        length.stepped(num_rows, num_tokens, base + per_token * num_tokens)
    return length


def test_the_price_is_the_share_of_a_token_in_its_step() -> None:
    assert learned(1, 0.02, 0.0004).price == pytest.approx(0.0004 / 0.0204, rel=1e-6)
    assert learned(16, 0.02, 0.002).price == pytest.approx(16 * 0.002 / 0.052, rel=1e-6)


def test_who_is_often_right_gets_long_drafts_and_who_is_not_gets_none() -> None:
    length = learned(16, 0.02, 0.002)
    for _ in range(20):
        length.verified("right", 8, 8)
        length.verified("wrong", 8, 0)
    assert limit(length, "right") >= 4
    assert limit(length, "wrong") == 0
    assert limit(length, "new") == 0  # a chance of a half is worth less than 0.6
    idle = learned(1, 0.02, 0.0001)
    assert limit(idle, "new") >= 4


def test_no_draft_pays_where_a_token_costs_its_whole_share() -> None:
    length = learned(64, 0.002, 0.002)
    for _ in range(20):
        length.verified("right", 8, 7)
    assert length.price > 0.97
    assert limit(length, "right") == 0


def test_of_what_is_withheld_a_token_is_tried_now_and_then() -> None:
    length = learned(16, 0.02, 0.02)
    assert length.price > 0.9
    limits = [limit(length, "new") for _ in range(4 * TRIAL_INTERVAL)]
    assert [limit for limit in limits if limit] == [1] * 4


def test_a_request_of_the_same_name_begins_anew() -> None:
    length = learned(1, 0.02, 0.0004)
    first = limit(length, "name")
    for _ in range(20):
        length.verified("name", 8, 0)
    assert limit(length, "name") < first
    length.forget("name")
    assert limit(length, "name") == first


def test_steps_of_one_size_say_nothing_of_the_price() -> None:
    """Free drafts would fill each step to its limit: no other size would ever be seen."""
    length = DraftLength(8)
    for number in range(40):
        length.stepped(64, 512 - 4 * (number == 7), 0.01 + 1e-4 * number)
    assert length.price == 1.0
    assert limit(length, "new") == 0
    length = learned(16, 0.02, 0.002)
    known = length.price
    for _ in range(2000):
        length.stepped(16, 16, 0.02 + 16 * 0.002)
    assert length.price == pytest.approx(known, rel=0.01)


def test_who_was_never_right_is_not_believed_to_be() -> None:
    length = learned(1, 0.02, 0.0004)  # a price of 0.02
    num_sent = 0
    for _ in range(400):
        if drafts := limit(length, "wrong"):
            length.verified("wrong", drafts, 0)
            num_sent += drafts
    assert num_sent < 400


def model_learned(num_rows: int, draft_seconds: float) -> ModelDraftLength:
    """A step takes 20 ms and 0.4 more per token, a pass of the drafting model so long."""
    length = ModelDraftLength(8)
    for number in range(40):
        num_tokens = num_rows * (1 + number % 9)
        length.drafted(num_rows, draft_seconds)
        length.stepped(num_rows, num_tokens, 0.02 + 0.0004 * num_tokens)
    return length


def test_making_a_draft_is_part_of_its_price() -> None:
    of_token, step = 4 * 0.0004 / 0.0216, 0.0216
    assert model_learned(4, 0.0).price == pytest.approx(of_token, abs=1e-3)
    assert model_learned(4, 0.0054).price == pytest.approx(of_token + 0.0054 / step, rel=1e-6)
    assert model_learned(4, 0.0216).limits({"new": 1}) == {}  # as dear as what it would save


def test_what_a_model_is_worth_is_known_of_a_new_request() -> None:
    good, bad = model_learned(1, 0.002), model_learned(1, 0.002)
    for number in range(20):
        good.verified(number, 4, 4)
        bad.verified(number, 4, 0)
    assert good.limits({"new": 1})["new"] > ModelDraftLength(8).limits({"new": 1})["new"] // 2
    assert [bad.limits({"new": 1}) for _ in range(2)] == [{"new": 1}, {}]  # a trial, and no more


def test_a_model_that_pays_for_nobody_is_tried_where_it_has_little_to_read() -> None:
    """As often as that takes a hundredth of the time: passes take 50 ms, steps of 16 tokens 26."""
    length = model_learned(16, 0.05)
    unread = {"long": 900, "short": 3}
    tries = []
    for _ in range(500):
        tries.append(length.limits(unread))
        length.stepped(16, 16, 0.0264)
        length.drafted(16, 0.05)
    assert {tuple(limits.items()) for limits in tries if limits} == {(("short", 1),)}
    assert 1 <= sum(map(bool, tries)) <= 500 * 0.0264 * 0.01 / 0.05 + 1


def test_a_long_text_is_read_only_if_guesses_will_repay_it() -> None:
    """A step takes 20.4 ms and the model 2 for a token, 0.2 for each more; half of it is right."""
    length = ModelDraftLength(8)
    for number in range(40):
        length.drafted(1 + 9 * (number % 2), 0.002 + 0.0002 * 9 * (number % 2))
        length.stepped(1, 1 + number % 9, 0.02 + 0.0004 * (1 + number % 9))
    worth = (0.5 - length.price) * 0.0204 * 128
    num_tokens = round((worth - 0.0018) / 0.0002)
    assert num_tokens > 1000
    assert length.limits({"short": num_tokens - 10, "long": num_tokens + 10}).keys() == {"short"}
    assert length.limits({"caught up": 9}).keys() == {"caught up"}


def test_what_a_policy_asks_for_counts_and_not_what_pays() -> None:
    length = learned(64, 0.002, 0.002)
    assert limit(length, "new") == 0
    length.asked = {"new": 3, "greedy": 99, "none": 0}
    assert [limit(length, name) for name in ("new", "greedy", "none")] == [3, 8, 0]
    cheap = learned(1, 0.02, 0.0001)
    cheap.asked = {"none": 0}
    assert limit(cheap, "none") == 0
    assert limit(cheap, "other") >= 4


def test_a_draft_model_follows_the_requests_that_are_asked_for_and_no_other_that_is_not_to() -> (
    None
):
    length = ModelDraftLength(8)
    length.asked = {"none": 0}
    assert length.limits({"none": 5, "open": 5}) == {"open": 8}  # nothing was measured yet
    length.price = 1.0
    length.asked = {"none": 0, "some": 2}
    assert length.limits({"none": 5, "some": 5, "open": 5}) == {"some": 2}
    length.asked = {"none": 0}
    for name in ("none", "open"):
        for _ in range(20):
            length.verified(name, 8, 0)
    assert length.limits({"none": 5}) == {}  # no trial of it either
    assert length.limits({"none": 5, "open": 5}) == {"open": 1}


def text_learned(num_rows: int, base: float, per_token: float) -> TextDraftLength:
    length = TextDraftLength(8)
    for number in range(40):
        num_tokens = num_rows * (1 + number % 9)
        length.stepped(num_rows, num_tokens, base + per_token * num_tokens)
    return length


def lost_share(length: TextDraftLength, look_seconds: float, per_token: float) -> float:
    """What searches and drafts of one row that are all wrong take of 5,000 steps."""
    lost, drafts = 0.0, 0
    for _ in range(5000):
        if drafts:
            length.verified("row", drafts, 0)
            lost += drafts * per_token
        length.stepped(1, 1 + drafts, 0.01 + per_token * (1 + drafts))
        drafts = 0
        if length.may_look():
            drafts = limit(length, "row", 3)
            length.looked(look_seconds)
            lost += look_seconds
    return lost / (5000 * (0.01 + per_token))


@pytest.mark.parametrize("look_seconds", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("per_token", [1e-5, 1e-3, 5e-3])
def test_searches_and_wrong_drafts_take_a_small_share_of_the_time(
    look_seconds: float, per_token: float
) -> None:
    length = text_learned(1, 0.01, per_token)
    one = (8 * per_token + look_seconds) / (5000 * (0.01 + per_token))  # the last may go beyond
    assert lost_share(length, look_seconds, per_token) < 1.2 * LOSS_SHARE + one


def test_where_drafts_are_right_every_step_is_searched() -> None:
    length = text_learned(1, 0.01, 0.001)
    looks, sent = 0, 0
    for _ in range(500):
        if sent:
            length.verified("row", sent, sent)
        length.stepped(1, 1 + sent, 0.011 + 0.001 * sent)
        sent = 0
        if length.may_look():
            looks += 1
            length.looked(1e-3)  # a tenth of a step
            assert limit(length, "row", 3) >= 1
            sent = 2
    assert looks > 450
    for _ in range(400):  # and when they are right no more, soon none
        if sent:
            length.verified("row", sent, 0)
        length.stepped(1, 1 + sent, 0.011 + 0.001 * sent)
        sent = 0
        if length.may_look():
            looks += 1
            length.looked(1e-3)
            sent = limit(length, "row", 3)
    assert looks < 550


def test_where_more_tokens_agree_drafts_are_believed_apart() -> None:
    length = text_learned(1, 0.01, 0.005)  # a price of a third
    for _ in range(20):
        if limit(length, "row", 3):
            length.verified("row", 2, 0)
        limit(length, "row", CLASSES[-1])
        length.verified("row", 8, 8)
    assert [limit(length, "row", agreed) for agreed in (3, CLASSES[-1])] == [0, 8]
    assert [limit(length, "new", agreed) for agreed in (3, CLASSES[-1])] == [0, 8]


def test_in_a_full_batch_texts_are_searched_now_and_then() -> None:
    length = text_learned(64, 0.002, 0.002)
    assert length.price > 0.97
    looks = 0
    for _ in range(4 * TRIAL_INTERVAL):
        length.stepped(64, 64, 0.13)
        looks += length.may_look()
    assert looks == 4


def test_a_policy_that_asks_for_drafts_gets_them_whatever_was_lost() -> None:
    length = text_learned(1, 0.01, 0.001)
    length.looked(1.0)
    length.stepped(1, 1, 0.011)
    assert not length.may_look()
    length.asked = {"row": 3}
    assert length.may_look()
    assert limit(length, "row", 3) == 3


def test_after_a_long_stall_drafts_come_back_soon() -> None:
    length = text_learned(1, 0.01, 0.001)
    length.looked(1000.0)  # a garbage collection, or a very long text
    open_after = []
    for number in range(round(MOST_DEBT / LOSS_SHARE) + 3):
        length.stepped(1, 1, 0.011)
        if length.may_look():
            open_after.append(number)
    assert open_after
    assert open_after[0] >= MOST_DEBT / LOSS_SHARE - 1  # but not before a step's time is repaid


def test_what_is_found_by_a_search_in_a_full_batch_is_tried_with_one_token() -> None:
    length = text_learned(64, 0.002, 0.002)
    tried = []
    for _ in range(3 * TRIAL_INTERVAL):
        length.stepped(64, 64, 0.13)
        if length.may_look():  # few texts have a match
            tried.append([limit(length, row, 3) for row in ("first", "second")])
    assert tried == [[1, 0]] * 3


def test_drafts_that_a_policy_asks_for_say_nothing_of_other_requests() -> None:
    length, fresh = text_learned(1, 0.01, 0.001), text_learned(1, 0.01, 0.001)
    length.asked = {"row": 8}
    for number in range(50):
        length.stepped(1, 9 if number else 1, 0.019 if number else 0.011)
        fresh.stepped(1, 1, 0.011)
        assert limit(length, "row", CLASSES[0]) == 8
        length.verified("row", 8, 0)
    length.asked = {}
    assert length.may_look()
    for agreed in (3, *CLASSES):
        assert limit(length, "other", agreed) == limit(fresh, "other", agreed) > 0
    assert limit(length, "row", CLASSES[0]) == 0  # of itself it says all
    assert limit(length, "row", 3) > 0


def test_a_policy_that_asks_for_drafts_of_one_request_opens_no_search_for_others() -> None:
    length = text_learned(1, 0.01, 0.001)
    length.looked(1.0)
    length.stepped(1, 1, 0.011)
    length.asked = {"row": 0}
    assert not length.may_look()
    length.asked = {"row": 3}
    assert length.may_look()
    assert not length.is_open


# Milliseconds of steps by tokens, as they were measured of kernels that compute tiles of 16 rows.
TILES = {1: 11.1, 4: 12.1, 8: 13.3, 12: 14.6, 16: 15.9, 17: 22.0, 24: 24.0, 32: 26.0, 33: 30.0}
TILES |= {48: 33.5, 64: 34.9, 65: 39.0, 128: 50.0, 129: 54.0, 256: 75.0, 512: 130.0}


def tiles_seconds(num_tokens: int) -> float:
    return float(np.interp(num_tokens, list(TILES), list(TILES.values()))) / 1000


def speed(num_rows: int, chance: float, share: float, noise: float = 0.0) -> float:
    """Tokens a second to those without drafts, in 3,000 steps. `chance`: of each draft token;
    `share`: of rows whose text is found again in a step; `noise`: of times, of which one in 100 is
    five times as long. Requests have 100 tokens, and prompts of 40.
    """
    rng, length = random.Random(num_rows), TextDraftLength(8)
    with_drafts = without = 0.0
    ages, sent = {row: 0 for row in range(num_rows)}, dict[int, int]()
    for _ in range(3000):
        left = [row for row, age in ages.items() if age >= 100]
        for row in left:
            length.forget(row)
            sent.pop(row, None)
            ages[row] = 0
        num_right = 0
        for row, drafts in sent.items():
            right = next((n for n in range(drafts) if rng.random() >= chance), drafts)
            length.verified(row, drafts, right)
            num_right, ages[row] = num_right + right, ages[row] + right
        ages = {row: age + 1 for row, age in ages.items()}
        plain = num_rows + 40 * len(left)
        seconds = tiles_seconds(plain + sum(sent.values()))
        with_drafts += seconds
        without += tiles_seconds(plain) + num_right * tiles_seconds(num_rows) / num_rows
        stalled = seconds * (5 if noise and rng.random() < 0.01 else 1)
        length.stepped(num_rows, plain + sum(sent.values()), stalled * rng.lognormvariate(0, noise))
        sent = {}
        if length.may_look():
            found = {row: (3, 1 + rng.randrange(8)) for row in ages if rng.random() < share}
            sent = {row: limit for row, limit in length.limits(found).items() if limit}
    return without / with_drafts


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize("num_rows", [1, 4, 15, 16, 17, 32, 64])
def test_drafts_that_are_seldom_right_lose_little_where_one_token_more_is_dear(
    num_rows: int, noise: float
) -> None:
    assert speed(num_rows, chance=0.25, share=0.05, noise=noise) > 0.99


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_many_right_drafts_gain_where_one_would_not_pay(noise: float) -> None:
    assert speed(16, chance=0.9, share=0.6, noise=noise) > 1.2
    assert speed(1, chance=0.9, share=0.6, noise=noise) > 2.0


def test_drafts_are_sent_together_or_not_at_all() -> None:
    """The 17th row costs 0.38 steps of 16 tokens, those after it nearly nothing."""
    length = TextDraftLength(8)
    for num_tokens in (*range(16, 64), 256):
        length.stepped(16, num_tokens, tiles_seconds(num_tokens))
    length.stepped(16, 16, tiles_seconds(16))
    for _ in range(30):
        length.verified("right", 8, 8)
        length.stepped(16, 24, tiles_seconds(24))
        length.stepped(16, 16, tiles_seconds(16))
    assert length.limits({"right": (3, 4)}) == {}
    found = {name: (3, 4) for name in "abcd"}
    limits = length.limits(found | {"right": (3, 4)})
    assert sum(limits.values()) > 8
    assert limits["right"] == 4


def test_a_step_without_drafts_comes_now_and_then_to_be_compared() -> None:
    length = text_learned(1, 0.01, 0.001)
    searched: list[bool] = []
    for _ in range(4 * COMPARED_IN):
        sent = 2 if searched and searched[-1] else 0
        if sent:
            length.verified("row", sent, sent)
        length.stepped(1, 1 + sent, 0.011 + 0.001 * sent)
        searched.append(length.may_look())
        assert (limit(length, "row", 3) > 0) == searched[-1]
    assert searched.count(False) == 4


def test_times_of_different_days_are_compared() -> None:
    """Sizes are learned when the machine is fast; then it is slow: a 17th row costs 22 / 15.9."""
    length = TextDraftLength(8)
    for pace in (1.0, 3.0):
        for number in range(300):
            drafts = 1 if pace == 1.0 and number % 3 == 0 else 0
            if drafts:
                length.verified("row", 1, 0)
            length.stepped(16, 16 + drafts, pace * tiles_seconds(16 + drafts))
    times = length._times
    assert times.seconds(16) == pytest.approx(3 * 0.0159, rel=0.02)
    assert times.seconds(17) / times.seconds(16) == pytest.approx(22 / 15.9, rel=0.02)


@settings(max_examples=examples(300, slow=5000), deadline=None)
@given(
    kind=st.sampled_from([DraftLength, TextDraftLength, ModelDraftLength]),
    steps=st.lists(
        st.tuples(
            st.integers(0, 70),  # rows
            st.integers(0, 3000),  # tokens besides one of each
            st.floats(0, 100),  # seconds
            st.integers(0, 8),  # of a draft that was verified
        ),
        min_size=1,
        max_size=60,
    ),
)
def test_whatever_steps_take_a_price_and_limits_come_of_them(
    kind: type[DraftLength], steps: list[tuple[int, int, float, int]]
) -> None:
    """What raises here would end the requests of a step."""
    length = kind(8)
    for num_rows, more, seconds, num_drafts in steps:
        if num_drafts:
            length.verified("name", num_drafts, num_drafts // 2)
        length.stepped(num_rows, max(num_rows + more, 1), seconds)
        assert 0.0 <= length.price < math.inf
        known: Any = (9, 8)
        if isinstance(length, ModelDraftLength):
            length.drafted(3, seconds)
            known = 9  # tokens that the model has not read
        elif isinstance(length, TextDraftLength):
            length.may_look()
            length.looked(seconds / 100)
        assert all(0 < own <= 8 for own in length.limits({"name": known, "new": known}).values())
