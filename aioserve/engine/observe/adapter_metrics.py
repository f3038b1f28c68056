"""Adapters as Prometheus sees them: how often each was asked for, what is in memory.

Knows counts and names. Knows nothing about how they come there.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

#: Names of adapters in memory, names of those that requests wait for, and places for adapters.
Places = tuple[list[str], list[str], int]


class AdapterMetrics(Collector):
    """Since the start. Nothing is counted until there was an adapter; which there are, pickers of
    gateways look for from the start on.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests: Counter[str] = Counter()  # by name
        self.num_loads = 0
        self.num_evictions = 0
        self.num_resident = 0
        self.get_places: Callable[[], Places] | None = None  # set by what loads adapters
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
