"""Counts over fixed bounds, and recent rates: plain numbers until a scrape.

Knows how Prometheus wants them; knows nothing about what is counted.
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
from prometheus_client.core import HistogramMetricFamily

# Long enough to see more than one long prompt, short enough to notice a change. A guess.
RATE_SECONDS = 10.0

# Longer than scrapes are apart, so that each of them sees what has happened since the last one.
WORST_SECONDS = 60.0
WORST_PARTS = 6  # the window is forgotten in this many parts

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

#: Of tokens of a request.
LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Histogram(msgspec.Struct, array_like=True):
    """Counts over fixed upper bounds, in seconds or whatever the bounds are in."""

    bounds: Sequence[float] = LATENCY_BUCKETS
    counts: list[int] = []  # of values up to each bound and above the last, of each its own
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Count one value, or `count` equal ones."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += count * value

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """As Prometheus wants it: cumulative, last bucket +Inf."""
        return HistogramMetricFamily(
            name, documentation, buckets=self.cumulative(), sum_value=self.total
        )

    def cumulative(self) -> list[tuple[str, float]]:
        """By upper bound, how many are not above it."""
        so_far, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            buckets.append((bound, float(so_far)))
        return buckets


def family_by(
    label: str, name: str, documentation: str, histograms: Iterable[tuple[str, Histogram]]
) -> HistogramMetricFamily:
    """Several as one family: each with its value of the label."""
    family = HistogramMetricFamily(name, documentation, labels=[label])
    for value, histogram in histograms:
        family.add_metric([value], histogram.cumulative(), histogram.total)
    return family


class RecentWorst:
    """The largest value of the last `WORST_SECONDS` at least, however often it is asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_parts: deque[tuple[int, float]] = deque(maxlen=WORST_PARTS + 1)

    def observe(self, value: float) -> None:
        """Count one value that was seen now."""
        part = self._part()
        if self._of_parts and self._of_parts[-1][0] == part:
            value = max(value, self._of_parts.pop()[1])
        self._of_parts.append((part, value))

    def __call__(self) -> float:
        """The largest value; 0 if no value came."""
        first = self._part() - WORST_PARTS
        return max((value for part, value in self._of_parts if part >= first), default=0.0)

    def _part(self) -> int:
        return int(self._clock() / WORST_SECONDS * WORST_PARTS)


class RecentRate:
    """A recent rate per second: an average that forgets with `RATE_SECONDS`."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since = self._last = math.nan

    def add(self, amount: float, now: float) -> None:
        """Add an amount that came at `now`, in seconds of any clock."""
        if math.isnan(self._since):
            self._since = self._last = now
        self._sum = self._faded(now) + amount
        self._last = now

    def per_second(self, now: float) -> float:
        """0 if nothing ever came."""
        if math.isnan(self._since):
            return 0.0
        # What came before the beginning is not known to be nothing.
        age = max(now - self._since, 1.0)
        return self._faded(now) / (RATE_SECONDS * -math.expm1(-age / RATE_SECONDS))

    def _faded(self, now: float) -> float:
        return self._sum * math.exp((self._last - now) / RATE_SECONDS)
