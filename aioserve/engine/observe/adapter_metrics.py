"""Adapters as Prometheus sees them: how often each was asked for, what is in memory.

Knows counts and names. Knows nothing about how they come there.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class AdapterMetrics(Collector):
    """Since the start. Nothing is told until there was an adapter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests: Counter[str] = Counter()  # by name
        self.num_loads = 0
        self.num_evictions = 0
        self.num_resident = 0
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for every scrape."""
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
