"""How far differences between two configurations could be chance.

Of several seeds each run gives one value of a statistic, and the interval is Student's for the mean
of the differences, seed by seed (the paired-t interval of independent replications; Law, Simulation
Modeling and Analysis, section 10.2). Of one seed, blocks of consecutive requests are drawn with
replacement (a bootstrap; Davison and Hinkley, 1997, section 8.2), as long as requests depend on
each other; both configurations get the same draw, so what they share cancels out. This module knows
arrays; it knows nothing about serving.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.lab.comparison.measures import GAP_EDGES, RunMeasures, quantile, statistics_of
from aioserve.lab.comparison.service import Floats

NUM_DRAWS = 1000
NUM_DRAWS_WITHIN = 200  # of each of several seeds: enough for a standard deviation
CHUNK = 50  # draws at a time: bounds the memory
LEVEL = 0.95
MIN_SEEDS = 2  # for Student's interval, which is wide with two
FEW_SEEDS = 10  # which seldom hold a rare one
MIN_BLOCKS = 10  # of one seed: with less to draw from, an interval claims more than it knows
# Stretches of five correlation times are nearly independent: measured, intervals of long runs
# covered less with stretches of two or three.
TIMES_PER_BLOCK = 5
WINDOW = 5  # correlation times, over which correlations are summed (Sokal)
WIDEST = 20.0  # logarithm of a factor; an interval of a ratio that is wider says nothing
MANY_DEGREES = 1000  # degrees of freedom from which an expansion has all digits of Student's

Weights = npt.NDArray[np.float64]  # [draws, blocks]: how often each was drawn
Ints = npt.NDArray[np.int64]
Values = npt.NDArray[np.floating[Any]]
Draws = Sequence[tuple[Floats, Floats]]  # by seed: a statistic in each draw, of both configurations


class Difference(msgspec.Struct, frozen=True):
    """The difference of one statistic, second configuration minus first, with its 95% interval; and
    the 95% interval of the second over the first, where both are positive in all draws.
    """

    value: float
    low: float | None = None
    high: float | None = None
    low_ratio: float | None = None
    high_ratio: float | None = None

    @property
    def is_distinguishable(self) -> bool:
        """Whether the interval leaves out 0. Without an interval nothing is."""
        if self.low is None or self.high is None:
            return False
        return not self.low <= 0 <= self.high

    @property
    def is_nothing(self) -> bool:
        """Whether the two configurations had equal values in every draw."""
        return self.value == self.low == self.high == 0


class Sampling(NamedTuple):
    """The way to find intervals: the blocks of requests of each seed, and draws of them."""

    blocks: Sequence[Ints] = ()  # by seed: the block of each request
    weights: Sequence[Weights] = ()  # by seed; empty: there is too little to draw from
    num_independent: int = 0  # stretches of the only seed that are drawn
    num_intervals: int = 1  # all of which cover the truth at once, with a probability of 95%

    def for_many(self, num_intervals: int) -> "Sampling":
        """Return the same draws for intervals that hold together (Bonferroni)."""
        return self._replace(num_intervals=num_intervals)

    @property
    def level(self) -> float:
        """The probability with which each interval covers the truth."""
        return 1 - (1 - LEVEL) / self.num_intervals

    @property
    def stretch(self) -> float:
        """The factor by which an interval is wider than the middle 95% of its draws."""
        count = self.num_independent
        # Drawn from n stretches, a mean varies by a factor of (n - 1) / n less than it does.
        lost = math.sqrt(count / (count - 1))
        return student_quantile(self.level, count - 1) / normal_quantile(LEVEL) * lost


def sample_seeds(blocks: Sequence[Ints]) -> Sampling:
    """Return how to draw from each of several seeds, whose requests belong to these blocks."""
    sizes = [int(block[-1]) + 1 if len(block) else 0 for block in blocks]
    return Sampling(blocks, [draw_weights(size, NUM_DRAWS_WITHIN) for size in sizes])


def sample_one(block: Ints, series: Sequence[Floats], num_draws: int = NUM_DRAWS) -> Sampling:
    """Return how to draw from the only seed, whose requests belong to these blocks.

    `series` are what requests measured, in the order of arrival. Stretches of whole blocks are
    drawn, `TIMES_PER_BLOCK` times as long as the longest time over which a series is correlated.
    """
    num_blocks = int(block[-1]) + 1 if len(block) else 0
    both = [s for values in series for s in (values, _ranks(values))]
    longest = max(map(correlation_time, both), default=1.0)
    num_independent = min(int(len(block) / (TIMES_PER_BLOCK * longest)), num_blocks)
    if num_independent < MIN_BLOCKS:
        return Sampling([block])
    stretch_of_block = np.arange(num_blocks) * num_independent // num_blocks
    weights = draw_weights(num_independent, num_draws)[:, stretch_of_block]
    return Sampling([block], [weights], num_independent)


def correlation_time(values: Floats) -> float:
    """Return the integrated autocorrelation time of a series, in places, at least 1: by this factor
    fewer independent values would tell its mean as well (Sokal, Monte Carlo Methods in Statistical
    Mechanics, 1997, section 3). NaN is left out.
    """
    known = values[~np.isnan(values)]
    if len(known) < 2:
        return 1.0
    known = known - np.mean(known)
    variance = float(np.mean(known**2))
    if variance <= 1e-18:
        return 1.0
    spectrum = np.fft.rfft(known, 2 * len(known))
    products = np.fft.irfft(spectrum * np.conj(spectrum), 2 * len(known))[: len(known)]
    times = 1 + 2 * np.cumsum(products[1:] / len(known) / variance)
    enough = np.flatnonzero(np.arange(1, len(known)) >= WINDOW * times)
    return max(1.0, float(times[enough[0]] if len(enough) else np.max(times)))


def _ranks(values: Floats) -> Floats:
    """Places by size: a few huge values hide how the others are correlated."""
    known = values[~np.isnan(values)]
    return np.argsort(np.argsort(known, kind="stable"), kind="stable").astype(float)


def normal_quantile(level: float) -> float:
    """Return the t for which a standard normal value lies between -t and t with probability
    `level`.
    """
    return NormalDist().inv_cdf((1 + level) / 2)


@cache
def student_quantile(level: float, degrees: int) -> float:
    """Return the t for which Student's value of `degrees` degrees of freedom lies between -t and t
    with probability `level`: from `MANY_DEGREES` on by the expansion around the normal quantile
    (Abramowitz and Stegun, 26.7.5), whose next term is below 1e-10 up to a `level` of 1 - 1e-8.
    """
    if degrees >= MANY_DEGREES:
        return _expanded_quantile(normal_quantile(level), degrees)
    low, high = 0.0, 1.0
    while student_share(high, degrees) < level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if student_share(middle, degrees) < level:
            low = middle
        else:
            high = middle
    return high


def _expanded_quantile(z: float, degrees: int) -> float:
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / float(degrees) ** power for power, term in enumerate(terms))


def student_share(t: float, degrees: int) -> float:
    """Return the probability of a value between -t and t (Abramowitz and Stegun, 26.7.3 and
    26.7.4).
    """
    angle = math.atan(t / degrees**0.5)
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for i in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine**2 * i / (i + 1)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def draw_weights(num_blocks: int, num_draws: int = NUM_DRAWS) -> Weights:
    """Return how often each block counts in each draw; always the same in all calls."""
    rng = np.random.default_rng(0)
    weights = np.zeros((num_draws, num_blocks))
    for draw in weights:
        np.add.at(draw, rng.integers(num_blocks, size=num_blocks), 1)
    return weights


def compare_requests(
    first: Sequence[Floats], second: Sequence[Floats], sampling: Sampling
) -> dict[str, Difference]:
    """Mean, median and p99 of a measure with one value per request, by seed. NaN is left out."""
    differences = {}
    for name in ("mean", "p50", "p99"):
        a, b = ([statistics_of(values)[name] for values in runs] for runs in (first, second))
        draws = [
            (_draw(name, x, block, weights), _draw(name, y, block, weights))
            for x, y, block, weights in zip(
                first, second, sampling.blocks, sampling.weights, strict=False
            )
        ]
        differences[name] = _compare(a, b, draws, sampling, same=_are_equal(first, second))
    return differences


def compare_gaps(
    first: Sequence[RunMeasures], second: Sequence[RunMeasures], sampling: Sampling
) -> dict[str, Difference]:
    """Median and p99 of the gaps between tokens; draws are of counts in bins of 1%."""
    differences = {}
    same = _are_equal([run.gaps for run in first], [run.gaps for run in second])
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        a, b = ([quantile(run.gaps, q) for run in runs] for runs in (first, second))
        draws = [
            (_draw_gaps(x, q, weights), _draw_gaps(y, q, weights))
            for x, y, weights in zip(first, second, sampling.weights, strict=False)
        ]
        differences[name] = _compare(a, b, draws, sampling, same=same)
    return differences


def _are_equal(first: Sequence[Values], second: Sequence[Values]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, second, strict=True))


def _compare(
    first: list[float], second: list[float], draws: Draws, sampling: Sampling, *, same: bool
) -> Difference:
    if same and not np.isnan(first).all():
        return Difference(0.0, 0.0, 0.0)
    if len(first) > 1:
        return compare_seeds(first, second, sampling, draws)
    return _difference(first[0], second[0], draws[0] if draws else None, sampling)


def compare_seeds(
    first: Sequence[float], second: Sequence[float], sampling: Sampling, draws: Draws = ()
) -> Difference:
    """Return the mean of a statistic with one value per seed, by Student's interval; it needs two
    seeds. Seeds in which either has no value (NaN) are left out. With `draws` from each seed the
    interval has room for what one seed leaves open, too: near saturation few seeds seldom hold the
    rare one that makes the mean. (Measured at 0.5, 0.9 and 1.1 of capacity, five seeds: without
    draws, 68 to 98% of the intervals of requests' durations covered the truth; with them, 76 to
    100%.)
    """
    a, b = np.array(first, dtype=float), np.array(second, dtype=float)
    known = np.flatnonzero(~np.isnan(a) & ~np.isnan(b))
    if not len(known):
        return Difference(float("nan"))
    a, b = a[known], b[known]
    draws = [draws[int(i)] for i in known] if draws else ()
    value = float(np.mean(b - a))
    if np.array_equal(a, b):
        return Difference(0.0, 0.0, 0.0)
    if len(a) < MIN_SEEDS:
        return Difference(value)
    student = student_quantile(sampling.level, len(a) - 1) / len(a) ** 0.5
    reach = student * _spread(b - a, [y - x for x, y in draws])
    ratios: tuple[float, float] | tuple[()] = ()
    if min(*a, *b, *(np.nanmin(d, initial=np.inf) for pair in draws for d in pair)) > 0:
        # Ratios are taken as logarithms, so that no interval of a latency reaches below 0.
        reach_log = student * _spread(np.log(b / a), [np.log(y / x) for x, y in draws])
        if reach_log < WIDEST:
            factor = math.exp(reach_log)
            ratio = float(np.mean(b)) / float(np.mean(a))
            ratios = ratio / factor, ratio * factor
    return Difference(value, value - reach, value + reach, *ratios)


def _spread(values: Floats, draws: Sequence[Floats]) -> float:
    """Return the standard deviation of values of seeds. That of the draws from each is added in
    full for few seeds, and less for more, which tell by themselves how far seeds are apart.
    """
    inside = float(np.mean([np.nanvar(d) for d in draws if not np.isnan(d).all()] or 0.0))
    doubt = min(1.0, (FEW_SEEDS - 1) / (len(values) - 1))
    return math.sqrt(float(np.var(values, ddof=1)) + doubt * inside)


def _difference(
    first: float, second: float, draws: tuple[Floats, Floats] | None, sampling: Sampling
) -> Difference:
    """Return the difference and the ratio of two values, with intervals from draws of both."""
    value = second - first
    if draws is None or np.isnan(value):
        return Difference(value)
    known = ~np.isnan(draws[0]) & ~np.isnan(draws[1])
    if not known.any():
        return Difference(float("nan"))
    a, b = draws[0][known], draws[1][known]
    ends = _interval(value, b - a, sampling.stretch)
    if min(first, second, float(np.min(a)), float(np.min(b))) <= 0:
        return Difference(value, *ends)
    # Ratios are drawn as logarithms, so that no interval of a latency reaches below 0.
    logs = _interval(math.log(second / first), np.log(b / a), sampling.stretch)
    return Difference(value, *ends, *map(math.exp, logs))


def _interval(value: float, draws: Floats, stretch: float) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    # Draws of a few blocks may all lie on one side of the estimate, which is an estimate still.
    low, high = min(float(low), value), max(float(high), value)
    return value - stretch * (value - low), value + stretch * (high - value)


def _draw(statistic: str, values: Floats, block: Ints, weights: Weights) -> Floats:
    """Return the statistic in each draw."""
    if statistic == "mean":
        return _means(values, block, weights)
    return _quantiles(values, block, weights, {"p50": 0.5, "p99": 0.99}[statistic])


def _draw_gaps(run: RunMeasures, q: float, weights: Weights) -> Floats:
    """Return the quantile of gaps in each draw."""
    whole = _bin_quantiles(np.ones((1, len(run.gap_counts))) @ run.gap_counts, q)
    # Bins are off by up to 1%, in all draws alike: what all of them say is moved.
    return _bin_quantiles(weights @ run.gap_counts, q) - whole + quantile(run.gaps, q)


def _means(values: Floats, block: npt.NDArray[np.int64], weights: Weights) -> Floats:
    known = ~np.isnan(values)
    size = weights.shape[1]
    sums = np.bincount(block[known], weights=values[known], minlength=size)
    counts = np.bincount(block[known], minlength=size)
    with np.errstate(invalid="ignore"):
        means: Floats = (weights @ sums) / (weights @ counts)
    return means


def _quantiles(values: Floats, block: npt.NDArray[np.int64], weights: Weights, q: float) -> Floats:
    """Return the quantile of each draw, exact: of the sorted values the first to reach the
    share.
    """
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return np.full(len(weights), np.nan)
    order = known[np.argsort(values[known], kind="stable")]
    parts = [
        _count_quantiles(weights[i : i + CHUNK][:, block[order]], values[order], q)
        for i in range(0, len(weights), CHUNK)
    ]
    return np.concatenate(parts)


def _bin_quantiles(counts: Floats, q: float) -> Floats:
    """Per row of counts by bin: the quantile, as if values lay evenly in their bins."""
    lows = np.concatenate([[0.0], GAP_EDGES])
    widths = np.diff(lows, append=lows[-1])
    cumulative = np.cumsum(counts, axis=1)
    wanted = q * cumulative[:, -1:]
    places = np.argmax(cumulative >= wanted - 1e-9, axis=1)[:, None]
    inside = np.take_along_axis(counts, places, axis=1)
    missing = np.take_along_axis(cumulative, places, axis=1) - wanted
    with np.errstate(invalid="ignore"):
        shares = 1 - missing / inside  # NaN where nothing was drawn
    quantiles: Floats = (lows[places] + shares * widths[places])[:, 0]
    return quantiles


def _count_quantiles(counts: Floats, values: Floats, q: float) -> Floats:
    """Per row: the first of the sorted `values` at which `counts` reach the share `q`."""
    cumulative = np.cumsum(counts, axis=1)
    totals = cumulative[:, -1]
    places = np.argmax(cumulative >= q * totals[:, None] - 1e-9, axis=1)
    return np.where(totals > 0, values[places], np.nan)
