"""How far differences between two configurations could be chance.

A hierarchical bootstrap (Efron; Davison and Hinkley, 1997, section 3.8): seeds are drawn with
replacement, and from each of them blocks of consecutive requests. Both configurations get the same
draw, so what they share cancels out. Knows arrays; knows nothing about serving.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.lab.comparison.measures import GAP_EDGES, RunMeasures
from aioserve.lab.comparison.service import Floats

NUM_DRAWS = 1000
CHUNK = 50  # draws at a time: bounds the memory
LEVEL = 0.95
# With less to draw from, an interval claims more than it knows. Of equal configurations, 16% to 25%
# were told apart by 3 blocks of one seed, 4% to 15% by 10; 10% to 43% by two seeds of which each
# came with a noise of its own, as live ones do.
MIN_SEEDS = 3
MIN_BLOCKS = 10  # of a simulation, which repeats exactly: fewer seeds will do then
LIKE_NORMAL = 200  # degrees of freedom from which Student's distribution is taken as normal

Weights = npt.NDArray[np.float64]  # [draws, blocks of all seeds]: how often each was drawn
Ints = npt.NDArray[np.int64]


class Difference(msgspec.Struct, frozen=True):
    """Of one statistic, second configuration minus first, with its 95% interval; and the 95%
    interval of the second over the first, where both are positive in all draws.
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
        """Whether the two never differed."""
        return self.value == self.low == self.high == 0


class Sampling(NamedTuple):
    """What is drawn, and what the draws are worth."""

    block: Ints  # of each request, all seeds one after the other
    weights: Weights | None  # None: there is too little to draw from
    num_seeds: int
    num_intervals: int = 1  # all of which cover the truth at once, with a probability of 95%

    def for_many(self, num_intervals: int) -> "Sampling":
        """The same draws for intervals that hold together (Bonferroni)."""
        return self._replace(num_intervals=num_intervals)

    @property
    def stretch(self) -> float:
        """The factor by which an interval is wider than the middle 95% of its draws."""
        usual = normal_quantile(LEVEL)
        level = 1 - (1 - LEVEL) / self.num_intervals
        if self.num_seeds < MIN_SEEDS:
            return normal_quantile(level) / usual
        # Drawn from n seeds, a mean varies by a factor of (n - 1) / n less than it does.
        lost = math.sqrt(self.num_seeds / (self.num_seeds - 1))
        return student_quantile(level, self.num_seeds - 1) / usual * lost


def sample(blocks: Sequence[Ints], *, is_live: bool, num_draws: int = NUM_DRAWS) -> Sampling:
    """How to draw from seeds whose requests belong to these blocks, each counted from 0.

    Live, the machine is another one in every round: only rounds tell by how much. A few seeds tell
    little of how seeds vary, so that intervals from three on are stretched by Student's factor.
    """
    sizes = [int(block[-1]) + 1 for block in blocks]
    offsets = np.cumsum([0, *sizes[:-1]])
    block = np.concatenate([b + offset for b, offset in zip(blocks, offsets, strict=True)])
    if len(blocks) < MIN_SEEDS and (is_live or sum(sizes) < MIN_BLOCKS):
        return Sampling(block, None, len(blocks))
    return Sampling(block, draw_weights(sizes, num_draws), len(blocks))


def normal_quantile(level: float) -> float:
    """The t for which a standard normal value lies between -t and t with probability `level`."""
    return NormalDist().inv_cdf((1 + level) / 2)


@cache
def student_quantile(level: float, degrees: int) -> float:
    """The t for which Student's value of `degrees` degrees of freedom lies between -t and t with
    probability `level`.
    """
    if degrees >= LIKE_NORMAL:
        return normal_quantile(level)
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


def student_share(t: float, degrees: int) -> float:
    """The probability of a value between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / degrees**0.5)
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for i in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine**2 * i / (i + 1)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def draw_weights(blocks_per_seed: Sequence[int], num_draws: int = NUM_DRAWS) -> Weights:
    """How often each block counts in each draw; always the same in all calls."""
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(blocks_per_seed)])
    weights = np.zeros((num_draws, int(starts[-1])))
    for draw in weights:
        for seed in rng.integers(len(blocks_per_seed), size=len(blocks_per_seed)):
            count = blocks_per_seed[seed]
            np.add.at(draw, starts[seed] + rng.integers(count, size=count), 1)
    return weights


def compare_requests(
    first: Sequence[Floats], second: Sequence[Floats], sampling: Sampling
) -> dict[str, Difference]:
    """Mean, median and p99 of a measure with one value per request, by seed. NaN is left out."""
    a, b = np.concatenate(first), np.concatenate(second)
    block, weights = sampling.block, sampling.weights
    if np.array_equal(a, b, equal_nan=True):  # drawing would find nothing else
        weights = np.ones((1, int(block[-1]) + 1))
    statistics: dict[str, Callable[[Floats, Weights], Floats]] = {
        "mean": lambda values, w: _means(values, block, w),
        "p50": lambda values, w: _quantiles(values, block, w, 0.5),
        "p99": lambda values, w: _quantiles(values, block, w, 0.99),
    }
    ones = np.ones((1, int(block[-1]) + 1))
    differences = {}
    for name, statistic in statistics.items():
        values = float(statistic(a, ones)[0]), float(statistic(b, ones)[0])
        draws = None if weights is None else (statistic(a, weights), statistic(b, weights))
        differences[name] = _difference(*values, draws, sampling.stretch)
    return differences


def compare_gaps(
    first: Sequence[RunMeasures], second: Sequence[RunMeasures], sampling: Sampling
) -> dict[str, Difference]:
    """Median and p99 of the gaps between tokens; the interval from counts in bins of 1%."""
    counts = [np.concatenate([run.gap_counts for run in runs]) for runs in (first, second)]
    exact = [np.sort(np.concatenate([run.gaps for run in runs])) for runs in (first, second)]
    if not all(len(gaps) for gaps in exact):
        return {}
    whole = np.ones((1, len(counts[0])))
    differences = {}
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        a, b = (float(gaps[max(int(np.ceil(q * len(gaps))) - 1, 0)]) for gaps in exact)
        draws = None
        if np.array_equal(exact[0], exact[1]):
            draws = np.array([a]), np.array([a])
        elif sampling.weights is not None:
            binned = [
                _bin_quantiles(np.concatenate([whole, sampling.weights]) @ c, q) for c in counts
            ]
            # Bins are off by up to 1%, in all draws alike: what all of them say is moved.
            draws = binned[0][1:] - binned[0][0] + a, binned[1][1:] - binned[1][0] + b
        differences[name] = _difference(a, b, draws, sampling.stretch)
    return differences


def compare_totals(first: Sequence[float], second: Sequence[float]) -> Difference:
    """A total with one value per seed, by Student's interval for a mean; it needs three seeds."""
    differences = np.array(second, dtype=float) - np.array(first, dtype=float)
    mean = float(np.mean(differences))
    if not np.any(differences):
        return Difference(0.0, 0.0, 0.0)
    if np.isnan(mean) or len(differences) < MIN_SEEDS:
        return Difference(mean)
    error = float(np.std(differences, ddof=1)) / len(differences) ** 0.5
    quantile = student_quantile(LEVEL, len(differences) - 1)
    reach = quantile * error
    ratios: tuple[float, float] | tuple[()] = ()
    if min(*first, *second) > 0:
        logs = np.log(np.array(second, dtype=float) / np.array(first, dtype=float))
        error = float(np.std(logs, ddof=1)) / len(logs) ** 0.5
        factor = math.exp(quantile * error)
        ratio = float(np.mean(second)) / float(np.mean(first))
        ratios = ratio / factor, ratio * factor
    return Difference(mean, mean - reach, mean + reach, *ratios)


def _difference(
    first: float, second: float, draws: tuple[Floats, Floats] | None, stretch: float
) -> Difference:
    """The difference and the ratio of two values, with intervals from draws of both."""
    value = second - first
    if draws is None or np.isnan(value):
        return Difference(value)
    known = ~np.isnan(draws[0]) & ~np.isnan(draws[1])
    if not known.any():
        return Difference(float("nan"))
    a, b = draws[0][known], draws[1][known]
    ends = _interval(value, b - a, stretch)
    if min(first, second, float(np.min(a)), float(np.min(b))) <= 0:
        return Difference(value, *ends)
    # Ratios are drawn as logarithms, so that no interval of a latency reaches below 0.
    logs = _interval(math.log(second / first), np.log(b / a), stretch)
    return Difference(value, *ends, *map(math.exp, logs))


def _interval(value: float, draws: Floats, stretch: float) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    # Draws of a few blocks may all lie on one side of the estimate, which is an estimate still.
    low, high = min(float(low), value), max(float(high), value)
    return value - stretch * (value - low), value + stretch * (high - value)


def _means(values: Floats, block: npt.NDArray[np.int64], weights: Weights) -> Floats:
    known = ~np.isnan(values)
    size = weights.shape[1]
    sums = np.bincount(block[known], weights=values[known], minlength=size)
    counts = np.bincount(block[known], minlength=size)
    with np.errstate(invalid="ignore"):
        means: Floats = (weights @ sums) / (weights @ counts)
    return means


def _quantiles(values: Floats, block: npt.NDArray[np.int64], weights: Weights, q: float) -> Floats:
    """The quantile of each draw, exact: of the sorted values the first to reach the share."""
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
