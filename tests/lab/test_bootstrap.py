"""Intervals: nothing where there is nothing, something where there is something, at their level."""

import numpy as np
import pytest

from aioserve.lab.bootstrap import (
    Difference,
    compare_requests,
    compare_totals,
    draw_weights,
)
from aioserve.lab.measures import Floats, block_numbers


def compare(first: list[Floats], second: list[Floats]) -> dict[str, Difference]:
    blocks = [block_numbers(len(values)) for values in first]
    weights = draw_weights([int(b[-1]) + 1 for b in blocks], 400)
    return compare_requests(first, second, blocks, weights)


def seeds(rng: np.random.Generator, shift: float = 0.0) -> list[Floats]:
    return [rng.exponential(1.0, 200) + shift for _ in range(5)]


def test_the_same_values_differ_by_nothing() -> None:
    values = seeds(np.random.default_rng(0))
    for difference in compare(values, values).values():
        assert difference.is_nothing
        assert not difference.is_distinguishable


def test_a_clear_difference_is_distinguishable_and_inside_of_its_interval() -> None:
    first = seeds(np.random.default_rng(0))
    second = [values + 0.3 for values in first]  # paired: every request is later
    for difference in compare(first, second).values():
        assert difference.is_distinguishable
        assert difference.value == pytest.approx(0.3)
        assert difference.low == pytest.approx(0.3)


def test_two_draws_of_the_same_kind_are_seldom_told_apart() -> None:
    told_apart = sum(
        compare(seeds(rng), seeds(rng))["mean"].is_distinguishable
        for rng in (np.random.default_rng(i) for i in range(40))
    )
    assert told_apart <= 6  # 5% of 40 are 2


def test_differences_between_seeds_widen_the_interval() -> None:
    first = [np.zeros(200)] * 5
    second = [np.full(200, shift) for shift in (-1.0, 2.0, -1.5, 1.0, 0.2)]
    assert not compare(first, second)["mean"].is_distinguishable


def test_undefined_values_are_left_out() -> None:
    first = [np.array([1.0, np.nan, 3.0])]
    difference = compare(first, [np.array([2.0, 5.0, np.nan])])
    assert difference["mean"].value == pytest.approx(3.5 - 2.0)
    nothing = compare([np.array([np.nan])], [np.array([1.0])])["p50"]
    assert np.isnan(nothing.value)
    assert not nothing.is_distinguishable


def test_totals_need_three_seeds_for_an_interval() -> None:
    assert compare_totals([1.0, 1.0], [2.0, 2.1]).low is None
    assert not compare_totals([1.0, 1.0], [2.0, 2.1]).is_distinguishable
    assert compare_totals([1.0] * 5, [2.0, 2.1, 1.9, 2.0, 2.2]).is_distinguishable
    assert not compare_totals([1.0] * 5, [2.0, 0.1, 1.9, 0.5, 0.4]).is_distinguishable
    assert compare_totals([1.0], [1.0]).is_nothing


def test_the_draws_are_the_same_every_time() -> None:
    assert (draw_weights([3, 4], 10) == draw_weights([3, 4], 10)).all()
    assert draw_weights([3, 4], 10).shape == (10, 7)
