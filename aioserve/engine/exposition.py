"""The metrics of one engine as Prometheus text: what a scrape of /metrics gets.

Reads the counts of `metrics`, and asks scheduler and runner how they are. Also under vLLM's names.
Knows nothing about HTTP; loaded with the first scrape.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from aioserve.engine.metrics import AdapterMetrics, EngineMetrics, Histogram
from aioserve.engine.operations.command import State, count_dropped_lines
from aioserve.outputs import FinishReason, SchedulerStats
from aioserve.request import WaitReason


class Exposition(Collector):
    """The collector of the metrics of an engine, in a registry of its own."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics, self._sources = metrics, metrics.sources
        #: Where parts register collectors of their own.
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._has_process = False

    def render(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        if not self._has_process:  # the first scrape
            self._has_process = True
            ProcessCollector(registry=self.registry)
        return bytes(generate_latest(self.registry))

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for every scrape: all of ours, then those under vLLM's names."""
        info = self._sources.info()
        own = list(self._own(info))
        yield from own
        yield from aliases(own, info.get("model", {}))
        yield from adapter_metrics(self._metrics.adapters)

    def _own(self, info: Mapping[str, Mapping[str, str]]) -> Iterator[Metric]:
        counts = self._metrics
        for name, labels in info.items():
            yield InfoMetricFamily(f"aioserve_{name}", f"The {name}, as it is set", dict(labels))
        yield CounterMetricFamily(
            "aioserve_prompt_tokens",
            "Prompt tokens of served requests",
            counts.num_prompt_tokens,
        )
        yield CounterMetricFamily(
            "aioserve_generation_tokens", "Tokens generated", counts.num_generation_tokens
        )
        yield CounterMetricFamily(
            "aioserve_policy_failures",
            "Times the policy raised, broke a rule or scheduled no request",
            self._sources.num_policy_failures(),
        )
        yield GaugeMetricFamily(
            "aioserve_policy_replaced",
            "1 while a plain policy plans in the place of one that has failed",
            int(self._sources.is_policy_replaced()),
        )
        states = GaugeMetricFamily(
            "aioserve_engine_state",
            "1 for what the engine does, as operators want it",
            labels=["state"],
        )
        for state in get_args(State):
            states.add_metric([state], state == self._sources.state())
        yield states
        finished = CounterMetricFamily(
            "aioserve_requests_finished", "Requests that ended, by reason", labels=["reason"]
        )
        for reason in FinishReason:
            finished.add_metric([reason.value], counts.finished[reason])
        yield finished
        yield counts.time_to_first_token.family(
            "aioserve_time_to_first_token_seconds", "From arrival to the first token"
        )
        yield counts.inter_token_latency.family(
            "aioserve_inter_token_latency_seconds", "Between deliveries of tokens to one request"
        )
        yield counts.request_latency.family(
            "aioserve_request_latency_seconds", "From arrival to the end"
        )
        for histogram, name, documentation in (
            (counts.queue_time, "request_queue_time", "From arrival to the first step"),
            (
                counts.prefill_time,
                "request_prefill_time",
                "From the first step to the first token",
            ),
            (counts.decode_time, "request_decode_time", "From the first token to the end"),
            (
                counts.inference_time,
                "request_inference_time",
                "From the first step to the end",
            ),
        ):
            yield histogram.family(f"aioserve_{name}_seconds", documentation)
        yield counts.prompt_lengths.family(
            "aioserve_request_prompt_tokens", "Prompt tokens of requests that ended"
        )
        yield counts.output_lengths.family(
            "aioserve_request_generation_tokens", "Tokens generated for requests that ended"
        )
        yield from self._of_processes()
        num_threads = self._sources.num_compute_threads()
        if num_threads is not None:
            yield GaugeMetricFamily(
                "aioserve_compute_threads", "Threads that compute steps now", num_threads
            )
        if counts.of_server is not None:
            yield from counts.of_server.collect()
        stats = self._sources.stats()
        if stats is not None:
            yield from scheduler_metrics(stats)
            yield self._waiting_by_reason()

    def _of_processes(self) -> Iterator[Metric]:
        """Yield the engine's, and those in front of it."""
        counts = self._metrics
        yield family_by(
            "process",
            "aioserve_event_loop_delay_seconds",
            "By how much a timer was late, ten times a second while there were requests",
            counts.loop_delays.items(),
        )
        if counts.loop_lags:
            lags = GaugeMetricFamily(
                "aioserve_event_loop_lag_seconds",
                "By how much a timer was late at worst in the last minute",
                labels=["process"],
            )
            for process, seconds in counts.loop_lags.items():
                lags.add_metric([process], seconds)
            yield lags
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        own = [*counts.counted.get("engine", ()), count_dropped_lines()]
        for process, counted in (counts.counted | {"engine": own}).items():
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
        counts = self._sources.wait_reasons()
        gauge = GaugeMetricFamily(
            "aioserve_num_requests_waiting_by_reason",
            "Requests that wait, by why the last step did not serve them",
            labels=["reason"],
        )
        for reason in WaitReason:
            gauge.add_metric([reason.value], counts[reason])
        return gauge


def family_by(
    label: str, name: str, documentation: str, histograms: Iterable[tuple[str, Histogram]]
) -> HistogramMetricFamily:
    """Several as one family: each with its value of the label."""
    family = HistogramMetricFamily(name, documentation, labels=[label])
    for value, histogram in histograms:
        family.add_metric([value], histogram.cumulative(), histogram.total)
    return family


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


def adapter_metrics(counts: AdapterMetrics) -> Iterator[Metric]:
    """Yield the metrics of adapters. Nothing is counted until there was one; their list is there
    from the start on, since pickers of gateways look for it.
    """
    if counts.get_places is not None:
        yield _lora_info(*counts.get_places())
    if not counts.num_loads:
        return
    requests = CounterMetricFamily(
        "aioserve_requests_by_adapter", "Requests that had an adapter", labels=["adapter"]
    )
    for name, count in counts.requests.items():
        requests.add_metric([name], count)
    yield requests
    yield GaugeMetricFamily("aioserve_adapters_resident", "Adapters in memory", counts.num_resident)
    yield CounterMetricFamily(
        "aioserve_adapter_loads", "Times an adapter was read into memory", counts.num_loads
    )
    yield CounterMetricFamily(
        "aioserve_adapter_evictions", "Times one gave its place to another", counts.num_evictions
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
