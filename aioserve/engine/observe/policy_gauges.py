"""A policy's own gauges as Prometheus sees them: one metric, a sample for each gauge.

Knows names and numbers. They are those of the policy that plans, so a switch takes the others away.
"""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from aioserve.outputs import SchedulerStats


def policy_gauges(stats: SchedulerStats, prefix: str) -> Iterator[Metric]:
    """The metric `policy_gauge`, if the policy shows any."""
    if stats.policy_gauges:
        family = GaugeMetricFamily(
            f"{prefix}_policy_gauge", "What the policy shows of itself", labels=["policy", "gauge"]
        )
        for name, value in stats.policy_gauges.items():
            family.add_metric([stats.policy, name], value)
        yield family
