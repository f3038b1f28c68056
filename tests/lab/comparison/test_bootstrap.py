"""Intervals: nothing where there is nothing, something where there is something, at their level."""

import math
from array import array

import numpy as np
import pytest

from aioserve.lab.comparison.bootstrap import (
    Difference,
    Sampling,
    compare_gaps,
    compare_requests,
    compare_seeds,
    correlation_time,
    draw_weights,
    normal_quantile,
    sample_one,
    sample_seeds,
    student_quantile,
)
from aioserve.lab.comparison.measures import RunMeasures, block_numbers
from aioserve.lab.comparison.service import Floats
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from tests.slow import mostly_slow


def compare(
    first: list[Floats], second: list[Floats], *, is_live: bool = False
) -> dict[str, Difference]:
    blocks = [block_numbers(len(values)) for values in first]
    sampling = sample_seeds(blocks)
    if len(first) == 1:
        sampling = Sampling() if is_live else sample_one(blocks[0], [first[0], second[0]], 400)
    return compare_requests(first, second, sampling)


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


def test_totals_need_two_seeds_for_an_interval() -> None:
    one = Sampling()
    assert compare_seeds([1.0], [2.0], one).low is None
    assert not compare_seeds([1.0], [2.0], one).is_distinguishable
    assert not compare_seeds([1.0, 1.0], [2.0, 2.5], one).is_distinguishable  # 12.7 times 0.25
    assert compare_seeds([1.0] * 5, [2.0, 2.1, 1.9, 2.0, 2.2], one).is_distinguishable
    assert not compare_seeds([1.0] * 5, [2.0, 0.1, 1.9, 0.5, 0.4], one).is_distinguishable
    assert compare_seeds([1.0], [1.0], one).is_nothing
    nan = float("nan")
    assert compare_seeds([1.0, nan, 2.0], [2.0, 1.0, 3.1], one).value == pytest.approx(1.05)
    assert np.isnan(compare_seeds([nan], [1.0], one).value)


def test_requests_that_depend_on_each_other_make_longer_stretches_and_wider_intervals() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=20_000)
    chain = np.zeros(20_000)
    for i in range(1, len(chain)):
        chain[i] = 0.9 * chain[i - 1] + noise[i]
    assert correlation_time(noise) == pytest.approx(1, abs=0.2)
    assert correlation_time(chain) == pytest.approx(19, rel=0.15)  # (1 + 0.9) / (1 - 0.9)
    assert correlation_time(np.ones(50)) == 1
    independent, dependent = compare([noise], [noise[::-1]]), compare([chain], [chain[::-1]])
    widths = [d["mean"].high - d["mean"].low for d in (independent, dependent)]  # type: ignore[operator]
    # A chain's values vary by 1 / (1 - 0.9 ** 2) more, and its mean by 19 times as much again.
    assert widths[1] / widths[0] == pytest.approx((19 / (1 - 0.81)) ** 0.5, rel=0.5)
    walk = np.cumsum(rng.normal(size=1000))
    assert compare([walk], [walk + 1])["mean"].low is None


#: `scipy.stats.t.ppf((1 + level) / 2, degrees)`, of scipy 1.17.
SCIPY = (
    (0.95, 1, 12.706204736),
    (0.95, 2, 4.302652730),
    (0.95, 10, 2.228138852),
    (0.95, 100, 1.983971519),
    (0.95, 200, 1.971896224),
    (0.95, 500, 1.964719837),
    (0.95, 1000, 1.962339081),
    (0.99, 4, 4.604094871),
)


def test_student_quantiles_are_those_of_scipy_to_a_millionth() -> None:
    for level, degrees, value in SCIPY:
        assert student_quantile(level, degrees) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("degrees", [3, 199, 200, 201, 998, 999, 1000, 1001, 30_000])
def test_students_density_has_its_level_within_the_quantile(degrees: int) -> None:
    """By Gauss and Legendre, which knows nothing of the sums and the expansion of the quantile."""
    places, weights = np.polynomial.legendre.leggauss(200)
    for level in (0.5, 0.95, 0.999, 1 - 0.05 / 435):
        t = student_quantile(level, degrees)
        x = t * (places + 1) / 2
        log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
        scale = math.exp(log - 0.5 * math.log(degrees * math.pi))
        density = scale * np.exp(-(degrees + 1) / 2 * np.log1p(x**2 / degrees))
        assert t * float(weights @ density) == pytest.approx(level, abs=1e-9)


def test_student_quantiles_fall_with_every_degree_of_freedom_to_the_normal_one() -> None:
    for level in (0.95, 0.999):
        found = [student_quantile(level, degrees) for degrees in (*range(190, 220), 500, 999, 1000)]
        found += [student_quantile(level, degrees) for degrees in (1001, 2000, 10**6, 10**12)]
        assert found == sorted(found, reverse=True)
        assert len(set(found)) == len(found)
        assert found[-1] == pytest.approx(normal_quantile(level), abs=1e-10)


def test_a_ratio_of_latencies_has_an_interval_of_positive_factors() -> None:
    rng = np.random.default_rng(0)
    first = [rng.lognormal(0, 2, 200) for _ in range(5)]
    second = [0.4 * rng.lognormal(0, 2, 200) for _ in range(5)]
    for difference in compare(first, second).values():
        assert difference.low_ratio is not None
        assert difference.high_ratio is not None
        assert 0 < difference.low_ratio <= difference.high_ratio
    totals = compare_seeds([10.0, 11.0, 9.0], [5.0, 6.0, 4.0], Sampling())
    assert totals.low_ratio == pytest.approx(0.387, rel=0.01)
    assert compare_seeds([0.0, 1.0, 2.0], [5.0, 6.0, 4.0], Sampling()).low_ratio is None


@pytest.mark.parametrize("num_comparisons", mostly_slow([5, 20], but=[5]))
def test_of_many_equal_clients_seldom_one_differs(num_comparisons: int) -> None:
    comparisons_with_a_difference = {1: 0, 20: 0}
    for i in range(num_comparisons):
        rng = np.random.default_rng(i)
        first, second = rng.exponential(1.0, (2, 4000))
        sampling = sample_one(block_numbers(4000), [], 400)
        for num_intervals in comparisons_with_a_difference:
            differences = [
                compare_requests(
                    [first[client::20]],
                    [second[client::20]],
                    sampling._replace(blocks=[sampling.blocks[0][client::20]]).for_many(
                        num_intervals
                    ),
                )["mean"]
                for client in range(20)
            ]
            is_any = any(difference.is_distinguishable for difference in differences)
            comparisons_with_a_difference[num_intervals] += is_any
    # Uncorrected, 64% of them are expected to have a difference, and corrected 5%.
    assert comparisons_with_a_difference[1] >= 0.4 * num_comparisons
    assert comparisons_with_a_difference[20] <= 0.2 * num_comparisons


def test_so_little_that_an_interval_would_claim_too_much_has_none() -> None:
    rng = np.random.default_rng(0)
    few, many = [rng.exponential(1.0, 100)], [rng.exponential(1.0, 400)]
    for is_live, values, has_interval in (
        (False, few, False),  # 5 blocks
        (False, many, True),
        (False, few * 2, True),
        (True, many, False),  # nothing tells how much the machine changed meanwhile
        (True, few * 2, True),
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
    for difference in compare_gaps(
        first, second, sample_seeds([run.block for run in first])
    ).values():
        assert difference.value == pytest.approx(-4e-6, rel=0.01)
        assert difference.low is not None
        assert difference.high is not None
        assert difference.low <= difference.value <= difference.high


def test_the_draws_are_the_same_every_time() -> None:
    assert (draw_weights(7, 10) == draw_weights(7, 10)).all()
    assert draw_weights(7, 10).shape == (10, 7)


def test_two_seeds_that_are_worlds_apart_have_a_difference_and_no_ratio() -> None:
    found = compare_seeds([1.0, 1.0], [1e-30, 1e30], Sampling())
    assert found.low is not None
    assert not found.is_distinguishable
    assert found.low_ratio is found.high_ratio is None
