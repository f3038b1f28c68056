"""Counts and durations of one engine, as Prometheus text.

Counted in plain integers on the event loop and read when somebody scrapes: a token costs two list
increments. Knows nothing about HTTP.
"""

import logging
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioserve.engine.adapter_metrics import AdapterMetrics
from aioserve.engine.kv_connector import KVConnectorMetrics
from aioserve.outputs import FinishReason, SchedulerStats
from aioserve.request import Request, RequestSpec, WaitReason
from aioserve.watch.shadow import Shadow

logger = logging.getLogger(__name__)

# Long enough to see more than one long prompt, short enough to notice a change. A guess.
RATE_SECONDS = 10.0

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Histogram:
    """Cumulative counts over fixed upper bounds, in seconds."""

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count one value, or `count` equal ones."""
        self.counts[bisect_left(self.bounds, seconds)] += count
        self.total += count * seconds

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """As Prometheus wants it: cumulative, last bucket +Inf."""
        cumulative, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self.total)


class RecentRate:
    """What comes per second, of late: an average that forgets with `RATE_SECONDS`."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since = self._last = math.nan

    def add(self, amount: float, now: float) -> None:
        """So much came now, in seconds of any clock."""
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


class RequestCounts(Protocol):
    """What is told of requests as they get their tokens."""

    num_generation_tokens: int

    def on_prompt_computed(self, request: Request, now: float) -> None:
        """There is a first token, or the vector of a prompt; `now` in seconds of the engine's
        clock.
        """

    def on_next_tokens(self, seconds: float, num_requests: int) -> None:
        """So many requests have new tokens, `seconds` after their last ones."""

    def on_finished(
        self, request: Request, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        """A request has ended."""


class EngineMetrics(Collector):
    """What happened to requests and tokens since the start."""

    def __init__(
        self,
        get_stats: Callable[[], SchedulerStats | None],
        get_wait_reasons: Callable[[], Counter[WaitReason]],
        get_num_policy_failures: Callable[[], int],
        get_num_compute_threads: Callable[[], int | None],
    ) -> None:
        """All are asked for the state of scheduler and runner when somebody scrapes."""
        self._get_stats = get_stats
        self._get_wait_reasons = get_wait_reasons
        self._get_num_policy_failures = get_num_policy_failures
        self._get_num_compute_threads = get_num_compute_threads
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.shadow = ShadowMetrics(self._registry)
        self.adapters = AdapterMetrics(self._registry)
        self.kv_connector = KVConnectorMetrics(self._registry)
        #: By process, in seconds: how late its event loop was of late. Set before a scrape.
        self.loop_lags: dict[str, float] = {}
        #: What the server has to tell besides; set by it.
        self.of_server: Collector | None = None
        #: Called with the name of the key that a request came with, and tokens that it has more.
        self.on_tokens: Callable[[str, int], None] | None = None
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.request_latency = Histogram()
        self.prompt_token_rate = RecentRate()  # as requests get their first tokens

    def on_accepted(self, spec: RequestSpec) -> None:
        """A request is in the queue, with all its samples."""
        if spec.key_name and self.on_tokens is not None:
            self.on_tokens(spec.key_name, len(spec.prompt_token_ids))

    def on_prompt_computed(self, request: Request, now: float) -> None:
        self.prompt_token_rate.add(request.num_prompt_tokens, now)
        self.num_prompt_tokens += request.num_prompt_tokens
        if request.pooling_params is None:  # it has a first token
            self.time_to_first_token.observe(now - request.arrival_time)

    def on_next_tokens(self, seconds: float, num_requests: int) -> None:
        self.inter_token_latency.observe(seconds, num_requests)

    def on_finished(
        self, request: Request, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        """One line in the log says how."""
        seconds = now - request.arrival_time
        self.finished[reason] += 1
        self.request_latency.observe(seconds)
        if request.spec.key_name and self.on_tokens is not None:
            self.on_tokens(request.spec.key_name, num_output_tokens)
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
        yield CounterMetricFamily(
            "aioserve_policy_failures",
            "Times the policy raised, broke a rule or scheduled nobody",
            self._get_num_policy_failures(),
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
        if self.loop_lags:
            lags = GaugeMetricFamily(
                "aioserve_event_loop_lag_seconds",
                "By how much a timer was late since the last scrape",
                labels=["process"],
            )
            for process, seconds in self.loop_lags.items():
                lags.add_metric([process], seconds)
            yield lags
        num_threads = self._get_num_compute_threads()
        if num_threads is not None:
            yield GaugeMetricFamily(
                "aioserve_compute_threads", "Threads that compute steps now", num_threads
            )
        if self.of_server is not None:
            yield from self.of_server.collect()
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


class ShadowMetrics(Collector):
    """What the shadow policy would have done. Compare with the metrics of the same names without
    `shadow`; those count from the arrival to the delivery, these to the end of the step.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.shadow: Shadow | None = None  # set once it is built
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.request_latency = Histogram()
        registry.register(self)

    def on_first_token(self, seconds: float) -> None:
        self.time_to_first_token.observe(seconds)

    def on_gap(self, seconds: float) -> None:
        self.inter_token_latency.observe(seconds)

    def on_finished(self, seconds: float) -> None:
        self.request_latency.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for every scrape."""
        if self.shadow is None:
            return
        for name, histogram in (
            ("time_to_first_token", self.time_to_first_token),
            ("inter_token_latency", self.inter_token_latency),
            ("request_latency", self.request_latency),
        ):
            yield histogram.family(f"aioserve_shadow_{name}_seconds", "Under the shadow policy")
        stats = self.shadow.stats
        yield CounterMetricFamily(
            "aioserve_shadow_cost_seconds", "Event loop time it took", stats.cost_seconds
        )
        yield CounterMetricFamily(
            "aioserve_shadow_resets", "Times it was too far behind and began anew", stats.num_resets
        )
        yield GaugeMetricFamily(
            "aioserve_shadow_failed", "1 if its policy raised and it is off", stats.is_failed
        )
        yield from _scheduler_metrics(self.shadow.scheduler.make_stats(), "aioserve_shadow")


def _scheduler_metrics(stats: SchedulerStats, prefix: str = "aioserve") -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, float], ...] = (
        ("num_requests_running", "Requests in the running batch", stats.num_running_reqs),
        ("num_requests_waiting", "Requests that wait", stats.num_waiting_reqs),
        ("num_tokens_waiting", "Tokens of requests that wait", stats.num_waiting_tokens),
        ("kv_cache_blocks", "KV blocks in the pool", stats.num_kv_blocks),
        ("kv_cache_used_blocks", "KV blocks held by requests", stats.num_used_kv_blocks),
        ("kv_cache_usage_ratio", "Share of KV blocks held", stats.kv_cache_usage),
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
            ("window_used_blocks", "Of these, held by requests", stats.num_used_window_blocks),
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
        ("prefix_cache_hit_tokens", "Tokens found there", stats.num_prefix_hit_tokens),
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
