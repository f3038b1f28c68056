"""Counts and durations of one engine, as Prometheus text.

Counted in plain integers on the event loop and read when somebody scrapes: a token costs two list
increments. Knows nothing about HTTP.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioserve.outputs import FinishReason, SchedulerStats
from aioserve.request import Request, WaitReason

logger = logging.getLogger(__name__)

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Histogram:
    """Cumulative counts over fixed upper bounds, in seconds."""

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """As Prometheus wants it: cumulative, last bucket +Inf."""
        cumulative, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self.total)


class EngineMetrics(Collector):
    """What happened to requests and tokens since the start."""

    def __init__(
        self,
        get_stats: Callable[[], SchedulerStats | None],
        get_wait_reasons: Callable[[], Counter[WaitReason]],
    ) -> None:
        """Both are asked for the scheduler's state when somebody scrapes."""
        self._get_stats = get_stats
        self._get_wait_reasons = get_wait_reasons
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.request_latency = Histogram()

    def on_tokens(
        self, request: Request, num_tokens: int, last_token_time: float | None, now: float
    ) -> None:
        """New tokens of a request; times in seconds of the engine's clock."""
        self.num_generation_tokens += num_tokens
        if last_token_time is None:
            self.num_prompt_tokens += request.num_prompt_tokens
            self.time_to_first_token.observe(now - request.arrival_time)
        else:
            self.inter_token_latency.observe(now - last_token_time)

    def on_finished(
        self, request: Request, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        """A request has ended; one line in the log says how."""
        seconds = now - request.arrival_time
        self.finished[reason] += 1
        self.request_latency.observe(seconds)
        logger.info(
            "%s finished: %s, %d prompt tokens (%d cached), %d output tokens, %.3f s, "
            "%d preemptions",
            request.request_id,
            reason.value,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            num_output_tokens,
            seconds,
            request.num_preemptions,
        )

    def render(self) -> bytes:
        """Prometheus text format."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for every scrape."""
        yield CounterMetricFamily(
            "aioserve_prompt_tokens", "Prompt tokens of served requests", self.num_prompt_tokens
        )
        yield CounterMetricFamily(
            "aioserve_generation_tokens", "Tokens generated", self.num_generation_tokens
        )
        finished = CounterMetricFamily(
            "aioserve_requests_finished", "Requests that ended, by reason", labels=["reason"]
        )
        for reason in FinishReason:
            finished.add_metric([reason.value], self.finished[reason])
        yield finished
        yield self.time_to_first_token.family(
            "aioserve_time_to_first_token_seconds", "From arrival to the first token"
        )
        yield self.inter_token_latency.family(
            "aioserve_inter_token_latency_seconds", "Between deliveries of tokens to one request"
        )
        yield self.request_latency.family(
            "aioserve_request_latency_seconds", "From arrival to the end"
        )
        stats = self._get_stats()
        if stats is not None:
            yield from _scheduler_metrics(stats)
            yield self._waiting_by_reason()

    def _waiting_by_reason(self) -> GaugeMetricFamily:
        counts = self._get_wait_reasons()
        gauge = GaugeMetricFamily(
            "aioserve_num_requests_waiting_by_reason",
            "Requests that wait, by why the last step did not serve them",
            labels=["reason"],
        )
        for reason in WaitReason:
            gauge.add_metric([reason.value], counts[reason])
        return gauge


def _scheduler_metrics(stats: SchedulerStats) -> Iterator[Metric]:
    gauges = (
        ("num_requests_running", "Requests in the running batch", stats.num_running_reqs),
        ("num_requests_waiting", "Requests that wait", stats.num_waiting_reqs),
        ("kv_cache_blocks", "KV blocks in the pool", stats.num_kv_blocks),
        ("kv_cache_used_blocks", "KV blocks held by requests", stats.num_used_kv_blocks),
        ("kv_cache_usage_ratio", "Share of KV blocks held", stats.kv_cache_usage),
    )
    for name, documentation, value in gauges:
        yield GaugeMetricFamily(f"aioserve_{name}", documentation, value)
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
        ("prefix_cache_hit_tokens", "Tokens found there", stats.num_prefix_hit_tokens),
    )
    for name, documentation, value in counters:
        yield CounterMetricFamily(f"aioserve_{name}", documentation, value)
