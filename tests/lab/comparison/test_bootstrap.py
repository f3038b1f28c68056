"""Intervals: nothing where there is nothing, something where there is something, at their level."""

from array import array

import numpy as np
import pytest

from aioserve.lab.comparison.bootstrap import (
    Difference,
    compare_gaps,
    compare_requests,
    compare_totals,
    draw_weights,
    sample,
    student_quantile,
)
from aioserve.lab.comparison.measures import RunMeasures, block_numbers
from aioserve.lab.comparison.service import Floats
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest


def compare(
    first: list[Floats], second: list[Floats], *, is_live: bool = False
) -> dict[str, Difference]:
    blocks = [block_numbers(len(values)) for values in first]
    return compare_requests(first, second, sample(blocks, is_live=is_live, num_draws=400))


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
    first = [np.array([1.0, np.nan, 3.0])] * 3
    difference = compare(first, [np.array([2.0, 5.0, np.nan])] * 3)
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


def test_student_quantiles_are_those_of_the_printed_tables() -> None:
    for level, degrees, printed in (
        (0.95, 2, 4.303),
        (0.95, 4, 2.776),
        (0.95, 9, 2.262),
        (0.99, 1, 63.657),
        (0.99, 4, 4.604),
        (0.999, 5, 6.869),
        (0.95, 1000, 1.96),
    ):
        assert student_quantile(level, degrees) == pytest.approx(printed, rel=3e-4)


def test_a_ratio_of_latencies_has_an_interval_of_positive_factors() -> None:
    rng = np.random.default_rng(0)
    first = [rng.lognormal(0, 2, 200) for _ in range(5)]
    second = [0.4 * rng.lognormal(0, 2, 200) for _ in range(5)]
    for difference in compare(first, second).values():
        assert difference.low_ratio is not None
        assert difference.high_ratio is not None
        assert 0 < difference.low_ratio <= difference.high_ratio
    totals = compare_totals([10.0, 11.0, 9.0], [5.0, 6.0, 4.0])
    assert totals.low_ratio == pytest.approx(0.387, rel=0.01)
    assert compare_totals([0.0, 1.0, 2.0], [5.0, 6.0, 4.0]).low_ratio is None


def test_of_many_equal_clients_seldom_one_differs() -> None:
    comparisons_with_a_difference = {1: 0, 20: 0}
    for i in range(20):
        rng = np.random.default_rng(i)
        first, second = rng.exponential(1.0, (2, 4000))
        sampling = sample([block_numbers(4000)], is_live=False, num_draws=400)
        for num_intervals in comparisons_with_a_difference:
            differences = [
                compare_requests(
                    [first[client::20]],
                    [second[client::20]],
                    sampling._replace(block=sampling.block[client::20]).for_many(num_intervals),
                )["mean"]
                for client in range(20)
            ]
            is_any = any(difference.is_distinguishable for difference in differences)
            comparisons_with_a_difference[num_intervals] += is_any
    assert comparisons_with_a_difference[1] >= 8  # 64% of 20 are 13
    assert comparisons_with_a_difference[20] <= 4  # 5% of 20 are 1


def test_so_little_that_an_interval_would_claim_too_much_has_none() -> None:
    rng = np.random.default_rng(0)
    few, many = [rng.exponential(1.0, 100)], [rng.exponential(1.0, 400)]
    for is_live, values, has_interval in (
        (False, few, False),  # 5 blocks
        (False, many, True),
        (False, few * 2, True),
        (True, many, False),  # nothing tells how much the machine changed meanwhile
        (True, many * 2, False),
        (True, few * 3, True),
    ):
        for difference in compare(values, [v + 1 for v in values], is_live=is_live).values():
            assert (difference.low is not None) == has_interval
            assert difference.is_distinguishable == has_interval
            assert difference.value == pytest.approx(1)
    for difference in compare(few, few, is_live=True).values():
        assert difference.is_nothing


def test_live_rounds_on_a_machine_that_changes_are_seldom_told_apart() -> None:
    told_apart = 0
    for i in range(40):
        rng = np.random.default_rng(i)
        pace = rng.lognormal(0, 0.3, (2, 3))  # how slow the machine was in each round
        first, second = ([rng.exponential(s, 60) for s in slow] for slow in pace)
        told_apart += compare(first, second, is_live=True)["mean"].is_distinguishable
    assert told_apart <= 6  # 5% of 40 are 2; it was 16 when few rounds counted as many


def gaps(seconds: Floats) -> list[RunMeasures]:
    """Three runs of 20 requests, all with these gaps."""
    outcome = RunOutcome(20)
    for request in outcome.requests:
        request.token_times = array("d", np.cumsum(seconds))
    workload = Workload("w", (WorkloadRequest(0.0, (Piece(1, 5),), 5),) * 20)
    return [RunMeasures(outcome, workload, None) for _ in range(3)]


def test_a_difference_of_gaps_smaller_than_a_bin_lies_in_its_interval() -> None:
    steady = np.linspace(0.0100, 0.0101, 50)
    first, second = gaps(steady), gaps(steady - 4e-6)
    sampling = sample([run.block for run in first], is_live=False)
    for difference in compare_gaps(first, second, sampling).values():
        assert difference.value == pytest.approx(-4e-6, rel=0.01)
        assert difference.low is not None
        assert difference.high is not None
        assert difference.low <= difference.value <= difference.high


def test_the_draws_are_the_same_every_time() -> None:
    assert (draw_weights([3, 4], 10) == draw_weights([3, 4], 10)).all()
    assert draw_weights([3, 4], 10).shape == (10, 7)
