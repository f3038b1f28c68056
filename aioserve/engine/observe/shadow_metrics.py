"""What the shadow policy would have done, as Prometheus metrics.

Counts what a shadow tells it; knows nothing about how that follows the live requests.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioserve.engine.observe.histogram import Histogram
from aioserve.engine.observe.scheduler_metrics import scheduler_metrics
from aioserve.engine.observe.shadow import Shadow


class ShadowMetrics(Collector):
    """What the shadow policy would have done. Compare with the metrics of the same names without
    `shadow`; those count from the arrival to the delivery, these to the end of the step.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.begin(None)
        registry.register(self)

    def begin(self, shadow: Shadow | None) -> None:
        """Count for another one from now on, from nothing; None: there is none."""
        self.shadow = shadow
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.request_latency = Histogram()

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
        yield from scheduler_metrics(self.shadow.scheduler.make_stats(), "aioserve_shadow")
