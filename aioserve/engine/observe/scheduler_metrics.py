"""What a scheduler counts, as Prometheus metrics: of the live one, and of a shadow.

Knows `SchedulerStats`, and how a policy's own gauges are told.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from aioserve.engine.observe.policy_gauges import policy_gauges
from aioserve.outputs import SchedulerStats


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
