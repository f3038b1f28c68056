"""vLLM's names for what is measured here as well: dashboards that were made for it work.

Only where the meaning is the same; the table is that of docs/operations.md.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

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
    """Those that have a name of theirs, under it, with their labels: the model's name as clients
    know it, and the number of the engine, of which there is one.
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
    """What pickers of gateways read the size of the KV cache from, as labels of a gauge that is 1;
    they call blocks of any device so.
    """
    labels = {"block_size": block_size, "num_gpu_blocks": str(num_blocks), "engine": "0"}
    found = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, as it is", labels=[*labels])
    found.add_metric([*labels.values()], 1)
    return found
