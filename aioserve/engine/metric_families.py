"""Parts of Prometheus metrics: histograms, recent rates, and what a scheduler counts.

Plain numbers until a scrape. Knows how Prometheus wants them; knows nothing about what is counted,
but `SchedulerStats`.
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from aioserve.outputs import SchedulerStats

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
        """Return the largest value; 0 if no value came."""
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


def scheduler_metrics(stats: SchedulerStats, prefix: str = "aioserve") -> Iterator[Metric]:
    """Gauges of what is there now, and counters of what has happened; names begin with `prefix`."""
    gauges: tuple[tuple[str, str, float], ...] = (
        ("num_requests_running", "Requests in the running batch", stats.num_running_reqs),
        ("num_requests_waiting", "Requests that wait", stats.num_waiting_reqs),
        (
            "num_requests_paused",
            "Paused requests: they wait, and keep KV blocks",
            stats.num_paused_reqs,
        ),
        ("num_tokens_waiting", "Tokens of requests that wait", stats.num_waiting_tokens),
        ("kv_cache_blocks", "KV blocks in the pool", stats.num_kv_blocks),
        ("kv_cache_used_blocks", "KV blocks of requests and leases", stats.num_used_kv_blocks),
        ("kv_cache_leased_blocks", "KV blocks that leases alone hold", stats.num_leased_kv_blocks),
        ("kv_cache_leases", "Leases of cached prefixes", stats.num_leases),
        ("kv_cache_usage_ratio", "Share of KV blocks held", stats.kv_cache_usage),
        ("encoder_cache_used_tokens", "Tokens of images kept", stats.num_used_encoder_tokens),
    )
    if stats.num_state_slots:
        used = stats.num_state_slots - stats.num_free_state_slots
        gauges += (
            ("state_slots", "Slots for the states of requests", stats.num_state_slots),
            ("state_used_slots", "Slots held by requests", used),
        )
    if stats.num_window_blocks:
        gauges += (
            ("window_blocks", "KV blocks for layers with a window", stats.num_window_blocks),
            ("window_used_blocks", "Window blocks in use", stats.num_used_window_blocks),
        )
    for name, documentation, value in gauges:
        yield GaugeMetricFamily(f"{prefix}_{name}", documentation, value)
    counters = (
        ("steps", "Steps planned", stats.num_steps),
        ("scheduled_prefill_tokens", "Prompt tokens scheduled", stats.num_prefill_tokens),
        ("scheduled_decode_tokens", "Decode tokens scheduled", stats.num_decode_tokens),
        ("preemptions", "Requests thrown out of the batch", stats.num_preemptions),
        (
            "prefix_cache_queried_tokens",
            "Tokens looked up in the prefix cache",
            stats.num_prefix_queried_tokens,
        ),
        (
            "prefix_cache_hit_tokens",
            "Tokens found in the prefix cache",
            stats.num_prefix_hit_tokens,
        ),
        ("encoder_inputs", "Images and sounds encoded", stats.num_encoder_inputs),
        ("encoder_tokens", "Tokens of images and sounds encoded", stats.num_encoder_tokens),
        (
            "encoder_cache_hits",
            "Images and sounds of requests that were encoded already",
            stats.num_encoder_hits,
        ),
        (
            "spec_decode_num_draft_tokens",
            "Draft tokens computed to be verified",
            stats.num_draft_tokens,
        ),
        (
            "spec_decode_num_accepted_tokens",
            "Draft tokens that were right: the others were wasted",
            stats.num_accepted_tokens,
        ),
    )
    for name, documentation, value in counters:
        yield CounterMetricFamily(f"{prefix}_{name}", documentation, value)
    yield from policy_gauges(stats, prefix)


def policy_gauges(stats: SchedulerStats, prefix: str) -> Iterator[Metric]:
    """Yield the metric `policy_gauge`, if the policy shows any."""
    if stats.policy_gauges:
        family = GaugeMetricFamily(
            f"{prefix}_policy_gauge", "What the policy shows of itself", labels=["policy", "gauge"]
        )
        for name, value in stats.policy_gauges.items():
            family.add_metric([stats.policy, name], value)
        yield family
