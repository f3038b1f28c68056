"""How far differences between two configurations could be chance.

A hierarchical bootstrap (Efron; Davison and Hinkley, 1997, section 3.8): seeds are drawn with
replacement, and from each of them blocks of consecutive requests. Both configurations get the same
draw, so what they share cancels out. Knows arrays; knows nothing about serving.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.lab.measures import GAP_EDGES, Floats, RunMeasures

NUM_DRAWS = 1000
CHUNK = 50  # draws at a time: bounds the memory
LEVEL = 0.95

Weights = npt.NDArray[np.float64]  # [draws, blocks of all seeds]: how often each was drawn


class Difference(msgspec.Struct, frozen=True):
    """Of one statistic, second configuration minus first, with its 95% interval."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_distinguishable(self) -> bool:
        """Whether the interval leaves out 0. Without an interval nothing is."""
        if self.low is None or self.high is None:
            return False
        return not self.low <= 0 <= self.high

    @property
    def is_nothing(self) -> bool:
        """Whether the two never differed."""
        return self.value == 0 and not self.low and not self.high


def draw_weights(blocks_per_seed: Sequence[int], num_draws: int = NUM_DRAWS) -> Weights:
    """How often each block counts in each draw; always the same, whoever asks."""
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(blocks_per_seed)])
    weights = np.zeros((num_draws, int(starts[-1])))
    for draw in weights:
        for seed in rng.integers(len(blocks_per_seed), size=len(blocks_per_seed)):
            count = blocks_per_seed[seed]
            np.add.at(draw, starts[seed] + rng.integers(count, size=count), 1)
    return weights


def compare_requests(
    first: Sequence[Floats],
    second: Sequence[Floats],
    blocks: Sequence[npt.NDArray[np.int64]],
    weights: Weights,
) -> dict[str, Difference]:
    """Mean, median and p99 of a measure with one value per request, by seed. NaN is left out."""
    offsets = np.cumsum([0, *(int(b[-1]) + 1 for b in blocks[:-1])])
    block = np.concatenate([b + offset for b, offset in zip(blocks, offsets, strict=True)])
    a, b = np.concatenate(first), np.concatenate(second)
    statistics: dict[str, Callable[[Floats, Weights], Floats]] = {
        "mean": lambda values, w: _means(values, block, w),
        "p50": lambda values, w: _quantiles(values, block, w, 0.5),
        "p99": lambda values, w: _quantiles(values, block, w, 0.99),
    }
    ones = np.ones((1, weights.shape[1]))
    return {
        name: _difference(
            (statistic(b, ones) - statistic(a, ones))[0],
            statistic(b, weights) - statistic(a, weights),
        )
        for name, statistic in statistics.items()
    }


def compare_gaps(
    first: Sequence[RunMeasures], second: Sequence[RunMeasures], weights: Weights
) -> dict[str, Difference]:
    """Median and p99 of the gaps between tokens; the interval from counts in bins of 1%."""
    counts = [np.concatenate([run.gap_counts for run in runs]) for runs in (first, second)]
    exact = [np.sort(np.concatenate([run.gaps for run in runs])) for runs in (first, second)]
    if not all(len(gaps) for gaps in exact):
        return {}
    middles = np.concatenate([GAP_EDGES, GAP_EDGES[-1:]])
    differences = {}
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        drawn = [_count_quantiles(weights @ c, middles, q) for c in counts]
        a, b = (float(gaps[max(int(np.ceil(q * len(gaps))) - 1, 0)]) for gaps in exact)
        differences[name] = _difference(b - a, drawn[1] - drawn[0])
    return differences


def compare_totals(first: Sequence[float], second: Sequence[float]) -> Difference:
    """A total with one value per seed; an interval needs at least three of them."""
    differences = np.array(second, dtype=float) - np.array(first, dtype=float)
    mean = float(np.mean(differences))
    if len(differences) < 3:
        return Difference(mean) if mean else Difference(0.0, 0.0, 0.0)
    rng = np.random.default_rng(0)
    draws = rng.integers(len(differences), size=(NUM_DRAWS, len(differences)))
    return _difference(mean, np.mean(differences[draws], axis=1))


def _difference(value: float, draws: Floats) -> Difference:
    known = draws[~np.isnan(draws)]
    if np.isnan(value) or not len(known):
        return Difference(float("nan"))
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(value), float(low), float(high))


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


def _count_quantiles(counts: Floats, values: Floats, q: float) -> Floats:
    """Per row: the first of the sorted `values` at which `counts` reach the share `q`."""
    cumulative = np.cumsum(counts, axis=1)
    totals = cumulative[:, -1]
    places = np.argmax(cumulative >= q * totals[:, None] - 1e-9, axis=1)
    return np.where(totals > 0, values[places], np.nan)
