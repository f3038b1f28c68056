"""Drafts as long as they pay: long where one token more costs little, none where it costs most."""

import pytest

from aioserve.runner.draft_length import TRIAL_INTERVAL, DraftLength


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
    assert length.limit("right") >= 4
    assert length.limit("wrong") == 0
    assert length.limit("new") == 0  # a chance of a half is worth less than 0.6
    idle = learned(1, 0.02, 0.0001)
    assert idle.limit("new") >= 4


def test_no_draft_pays_where_a_token_costs_its_whole_share() -> None:
    length = learned(64, 0.002, 0.002)
    for _ in range(20):
        length.verified("right", 8, 7)
    assert length.price > 0.97
    assert length.limit("right") == 0


def test_what_is_withheld_is_tried_now_and_then() -> None:
    length = learned(16, 0.02, 0.02)
    assert length.price > 0.9
    limits = [length.limit("new") for _ in range(4 * TRIAL_INTERVAL)]
    assert [limit for limit in limits if limit] == [8] * 4


def test_a_request_of_the_same_name_begins_anew() -> None:
    length = learned(1, 0.02, 0.0004)
    first = length.limit("name")
    for _ in range(20):
        length.verified("name", 8, 0)
    assert length.limit("name") < first
    length.forget("name")
    assert length.limit("name") == first


def test_steps_of_one_size_say_nothing_of_the_price() -> None:
    length = DraftLength(8)
    for _ in range(40):
        length.stepped(16, 16, 0.01)
    assert length.price == 0.0
    assert length.limit("new") == 8
