"""Counts and durations of one engine, as Prometheus text.

Counted in plain integers on the event loop and read on a scrape: a token costs two list increments.
Knows nothing about HTTP. Begins with parts of metrics, which are plain numbers until a scrape.
"""

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, get_args

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from aioserve.engine.operations.command import Counted, State, count_dropped_lines
from aioserve.engine.stream import SampleState
from aioserve.outputs import FinishReason, SchedulerStats
from aioserve.request import RequestSpec, WaitReason
from aioserve.support.parts import load

if TYPE_CHECKING:
    from aioserve.kv_cache import KVConnectorBase


# Parts of metrics: histograms, recent rates, and what a scheduler counts.


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
        """Return the histogram as Prometheus wants it: cumulative, with +Inf as the last bucket."""
        return HistogramMetricFamily(
            name, documentation, buckets=self.cumulative(), sum_value=self.total
        )

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the cumulative counts: for each upper bound, how many values are not above it."""
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
        """Return the rate at the time `now`; 0 if nothing was ever counted."""
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


# The metrics of an engine.


class Latencies:
    """Times to first token and gaps between tokens since the last reading."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []  # seconds
        self.gaps: Counter[float] = Counter()  # how many, by seconds

    def take(self) -> tuple[list[float], list[tuple[float, int]]]:
        """Return both in milliseconds; gaps to three digits, with how many there are of each."""
        first_tokens = [round(1e3 * seconds, 2) for seconds in self.first_tokens]
        gaps: Counter[float] = Counter()
        for seconds, count in self.gaps.items():
            gaps[float(f"{1e3 * seconds:.3g}")] += count
        self.first_tokens, self.gaps = [], Counter()
        return first_tokens, list(gaps.items())


class RequestCounts(Protocol):
    """Counts of requests and tokens, kept as requests get their tokens."""

    num_generation_tokens: int

    def on_prompt_computed(self, state: SampleState, now: float) -> None:
        """Note the first token or a prompt's vector; `now` in seconds of the engine's clock."""

    def on_next_tokens(self, seconds: float, num_requests: int) -> None:
        """Count requests that have new tokens, `seconds` after their last ones."""

    def on_finished(
        self, state: SampleState, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        """Count the end of a request, and its latencies."""


class ShadowMetrics(Protocol):
    """The latencies that another policy would have given the requests that come."""

    shadow: Any  # None: there is none
    time_to_first_token: "Histogram"
    inter_token_latency: "Histogram"
    request_latency: "Histogram"


class KVConnectorMetrics(Protocol):
    """The metrics of a KV connector."""

    connector: "KVConnectorBase | None"  # set once it is made


class EngineMetrics(Collector):
    """The counts of requests and tokens since the start, and their latencies."""

    def __init__(
        self,
        get_stats: Callable[[], SchedulerStats | None],
        get_wait_reasons: Callable[[], Counter[WaitReason]],
        get_num_policy_failures: Callable[[], int],
        is_policy_replaced: Callable[[], bool],
        get_num_compute_threads: Callable[[], int | None],
        get_info: Callable[[], Mapping[str, Mapping[str, str]]],
        get_state: Callable[[], State],
    ) -> None:
        """All are asked for the state of scheduler and runner on a scrape; `get_info` for
        what is set, as labels by name.
        """
        self._get_stats = get_stats
        self._get_wait_reasons = get_wait_reasons
        self._get_num_policy_failures = get_num_policy_failures
        self._is_policy_replaced = is_policy_replaced
        self._get_num_compute_threads = get_num_compute_threads
        self._get_info = get_info
        self._get_state = get_state
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.adapters = AdapterMetrics(self._registry)
        #: By process, in seconds: how late its event loop was recently. Set before a scrape.
        self.loop_lags: dict[str, float] = {}
        #: What the server has to tell besides; set by it.
        self.of_server: Collector | None = None
        #: Called with the name of the key that a request came with, tokens that it has more, and
        #: its id.
        self.on_tokens: Callable[[str, int, str], None] | None = None
        #: By process: how late it was while the process was busy.
        self.loop_delays: dict[str, Histogram] = {"engine": Histogram()}
        #: By process: what its server has counted. Set before a scrape.
        self.counted: dict[str, list[Counted]] = {}
        self._has_process = False
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.request_latency = Histogram()
        self.queue_time = Histogram()
        self.prefill_time = Histogram()
        self.decode_time = Histogram()
        self.inference_time = Histogram()
        self.prompt_lengths = Histogram(LENGTH_BUCKETS)
        self.output_lengths = Histogram(LENGTH_BUCKETS)
        self.prompt_token_rate = RecentRate()  # as requests get their first tokens
        self.latencies: Latencies | None = None  # while a page looks

    @cached_property
    def shadow(self) -> ShadowMetrics:
        """Metrics of what the shadow policy would have done; registered when it is asked for."""
        made: ShadowMetrics = load("engine", "shadow metrics")(self._registry)
        return made

    @cached_property
    def kv_connector(self) -> KVConnectorMetrics:
        """Metrics of the KV connector; registered when it is asked for."""
        made: KVConnectorMetrics = load("engine", "KV connector metrics")(self._registry)
        return made

    def on_accepted(self, spec: RequestSpec) -> None:
        """A request is in the queue, with all its samples."""
        if spec.key_name and self.on_tokens is not None:
            self.on_tokens(spec.key_name, len(spec.prompt_token_ids), spec.request_id)

    def on_prompt_computed(self, state: SampleState, now: float) -> None:
        request = state.request
        self.prompt_token_rate.add(request.num_prompt_tokens, now)
        self.num_prompt_tokens += request.num_prompt_tokens
        if request.pooling_params is None:  # it has a first token
            self.time_to_first_token.observe(now - request.arrival_time)
            if self.latencies is not None:
                self.latencies.first_tokens.append(now - request.arrival_time)

    def on_next_tokens(self, seconds: float, num_requests: int) -> None:
        self.inter_token_latency.observe(seconds, num_requests)
        if self.latencies is not None:
            self.latencies.gaps[seconds] += num_requests

    def on_finished(
        self, state: SampleState, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        request = state.request
        seconds = now - request.arrival_time
        self.finished[reason] += 1
        self.request_latency.observe(seconds)
        if request.spec.key_name and self.on_tokens is not None:
            self.on_tokens(request.spec.key_name, num_output_tokens, request.request_id)
        self.prompt_lengths.observe(request.num_prompt_tokens)
        self.output_lengths.observe(num_output_tokens)
        self._observe_phases(state, now)

    def _observe_phases(self, state: SampleState, now: float) -> None:
        """Note phases. A request that was never served only queued; without a token, none is
        decode. It may have been preempted in either phase.
        """
        served = now if state.scheduled_time is None else state.scheduled_time
        self.queue_time.observe(served - state.request.arrival_time)
        if state.scheduled_time is not None:
            first = now if state.first_token_time is None else state.first_token_time
            self.prefill_time.observe(first - served)
            self.inference_time.observe(now - served)
            if state.first_token_time is not None:
                self.decode_time.observe(now - first)

    def render(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        if not self._has_process:  # the first scrape
            self._has_process = True
            ProcessCollector(registry=self._registry)
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for every scrape: all of ours, then those under vLLM's names."""
        info = self._get_info()
        own = list(self._own(info))
        yield from own
        yield from aliases(own, info.get("model", {}))

    def _own(self, info: Mapping[str, Mapping[str, str]]) -> Iterator[Metric]:
        for name, labels in info.items():
            yield InfoMetricFamily(f"aioserve_{name}", f"The {name}, as it is set", dict(labels))
        yield CounterMetricFamily(
            "aioserve_prompt_tokens", "Prompt tokens of served requests", self.num_prompt_tokens
        )
        yield CounterMetricFamily(
            "aioserve_generation_tokens", "Tokens generated", self.num_generation_tokens
        )
        yield CounterMetricFamily(
            "aioserve_policy_failures",
            "Times the policy raised, broke a rule or scheduled no request",
            self._get_num_policy_failures(),
        )
        yield GaugeMetricFamily(
            "aioserve_policy_replaced",
            "1 while a plain policy plans in the place of one that has failed",
            int(self._is_policy_replaced()),
        )
        states = GaugeMetricFamily(
            "aioserve_engine_state",
            "1 for what the engine does, as operators want it",
            labels=["state"],
        )
        for state in get_args(State):
            states.add_metric([state], state == self._get_state())
        yield states
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
        for histogram, name, documentation in (
            (self.queue_time, "request_queue_time", "From arrival to the first step"),
            (self.prefill_time, "request_prefill_time", "From the first step to the first token"),
            (self.decode_time, "request_decode_time", "From the first token to the end"),
            (self.inference_time, "request_inference_time", "From the first step to the end"),
        ):
            yield histogram.family(f"aioserve_{name}_seconds", documentation)
        yield self.prompt_lengths.family(
            "aioserve_request_prompt_tokens", "Prompt tokens of requests that ended"
        )
        yield self.output_lengths.family(
            "aioserve_request_generation_tokens", "Tokens generated for requests that ended"
        )
        yield from self._of_processes()
        num_threads = self._get_num_compute_threads()
        if num_threads is not None:
            yield GaugeMetricFamily(
                "aioserve_compute_threads", "Threads that compute steps now", num_threads
            )
        if self.of_server is not None:
            yield from self.of_server.collect()
        stats = self._get_stats()
        if stats is not None:
            yield from scheduler_metrics(stats)
            yield self._waiting_by_reason()

    def _of_processes(self) -> Iterator[Metric]:
        """Yield the engine's, and those in front of it."""
        yield family_by(
            "process",
            "aioserve_event_loop_delay_seconds",
            "By how much a timer was late, ten times a second while there were requests",
            self.loop_delays.items(),
        )
        if self.loop_lags:
            lags = GaugeMetricFamily(
                "aioserve_event_loop_lag_seconds",
                "By how much a timer was late at worst in the last minute",
                labels=["process"],
            )
            for process, seconds in self.loop_lags.items():
                lags.add_metric([process], seconds)
            yield lags
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        own = [*self.counted.get("engine", ()), count_dropped_lines()]
        for process, counted in (self.counted | {"engine": own}).items():
            for one in counted:
                if one.name not in families:
                    family = GaugeMetricFamily if one.is_gauge else CounterMetricFamily
                    families[one.name] = family(
                        f"aioserve_{one.name}", one.documentation, labels=[*one.labels, "process"]
                    )
                for values, count in one.counts:
                    families[one.name].add_metric([*values, process], count)
        yield from families.values()

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


# vLLM's names for what is measured here as well: dashboards that were made for it work. Only where
# the meaning is the same; the table is that of docs/metrics.md.


#: vLLM's names of a metric family by our name of it, all without their prefix.
VLLM_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    # The second is its older name, which pickers of gateways ask for.
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queried_tokens": ("prefix_cache_queries",),
    "prefix_cache_hit_tokens": ("prefix_cache_hits",),
    "preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "requests_finished": ("request_success",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    # The second is its older name.
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "request_decode_time_seconds": ("request_decode_time_seconds",),
    "request_inference_time_seconds": ("request_inference_time_seconds",),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
}

#: Labels that they call otherwise.
VLLM_LABELS = {"reason": "finished_reason"}


def aliases(metrics: Iterable[Metric], labels_of_model: Mapping[str, str]) -> Iterator[Metric]:
    """Yield those that have a name of theirs, under it, with their labels: the model's name as
    clients know it, and the number of the engine, of which there is one.
    """
    model = labels_of_model.get("model", "")
    for metric in metrics:
        if metric.name == "aioserve_kv_cache_blocks":
            yield _cache_config(labels_of_model["block_size"], int(metric.samples[0].value))
        for name in VLLM_NAMES.get(metric.name.removeprefix("aioserve_"), ()):
            alias = Metric(f"vllm:{name}", metric.documentation, metric.type)
            for sample in metric.samples:
                labels = {VLLM_LABELS.get(key, key): value for key, value in sample.labels.items()}
                alias.add_sample(
                    alias.name + sample.name.removeprefix(metric.name),
                    {"model_name": model, "engine": "0", **labels},
                    sample.value,
                )
            yield alias


def _cache_config(block_size: str, num_blocks: int) -> Metric:
    """Return what pickers of gateways read the size of the KV cache from, as labels of a gauge that
    is 1; they call blocks of any device so.
    """
    labels = {"block_size": block_size, "num_gpu_blocks": str(num_blocks), "engine": "0"}
    found = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, as it is", labels=[*labels])
    found.add_metric([*labels.values()], 1)
    return found


# What is told of LoRA adapters, also where none was loaded yet.


#: Names of adapters in memory, names of those that requests wait for, and places for adapters.
Places = tuple[list[str], list[str], int]


class AdapterMetrics(Collector):
    """The metrics of LoRA adapters since the start. Nothing is counted until there was an adapter;
    the list of adapters is there from the start on, since pickers of gateways look for it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests: Counter[str] = Counter()  # by name
        self.num_loads = 0
        self.num_evictions = 0
        self.num_resident = 0
        self.get_places: Callable[[], Places] | None = None  # set once there is a runner
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for every scrape."""
        if self.get_places is not None:
            yield _lora_info(*self.get_places())
        if not self.num_loads:
            return
        requests = CounterMetricFamily(
            "aioserve_requests_by_adapter", "Requests that had an adapter", labels=["adapter"]
        )
        for name, count in self.requests.items():
            requests.add_metric([name], count)
        yield requests
        yield GaugeMetricFamily(
            "aioserve_adapters_resident", "Adapters in memory", self.num_resident
        )
        yield CounterMetricFamily(
            "aioserve_adapter_loads", "Times an adapter was read into memory", self.num_loads
        )
        yield CounterMetricFamily(
            "aioserve_adapter_evictions", "Times one gave its place to another", self.num_evictions
        )


def _lora_info(loaded: list[str], awaited: list[str], most: int) -> Metric:
    """As the model-server protocol of the inference gateway has it, under vLLM's name: all is in
    labels, and the value is the time, by which the newest is found.
    """
    labels = {
        "max_lora": str(most),
        "running_lora_adapters": ",".join(loaded),
        "waiting_lora_adapters": ",".join(awaited),
    }
    found = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters", labels=[*labels])
    found.add_metric([*labels.values()], time.time())
    return found
