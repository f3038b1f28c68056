"""A replica's state among Ray's own metrics, where its dashboards and Prometheus find it.

Ray adds the replica and the deployment as labels. What a front end counts is not here.
"""

import asyncio
import math
from collections.abc import Callable

import msgspec
from ray.util.metrics import Gauge

from aioserve.outputs import SchedulerStats

OF_POLICY = ("policy", "policy_gauges")  # fields that are told by a gauge of their own
REPORT_SECONDS = 5.0  # Ray collects what there is every ten


class StatsGauges:
    """A gauge per number of `SchedulerStats`, for the two shares that follow from them, and one
    for what the policy shows of itself.
    """

    def __init__(self, get_stats: Callable[[], SchedulerStats | None]) -> None:
        self._get_stats = get_stats
        fields = [name for name in SchedulerStats.__struct_fields__ if name not in OF_POLICY]
        names = (*fields, "kv_cache_usage", "prefix_hit_rate")
        self._gauges = {name: Gauge(f"aioserve_{name}") for name in names}
        self._of_policy = Gauge("aioserve_policy_gauge", tag_keys=("policy", "gauge"))
        self._shown: set[tuple[str, str]] = set()  # by policy and gauge

    def report(self) -> None:
        """Set the gauges to the engine's stats of now."""
        stats = self._get_stats()
        if stats is None:
            return
        values = msgspec.structs.asdict(stats)
        values |= {
            "kv_cache_usage": stats.kv_cache_usage,
            "prefix_hit_rate": stats.prefix_hit_rate,
        }
        for name, gauge in self._gauges.items():
            gauge.set(values[name])
        shown = {(stats.policy, name): value for name, value in stats.policy_gauges.items()}
        for policy, name in self._shown - shown.keys():  # of a policy that has gone
            self._of_policy.set(math.nan, {"policy": policy, "gauge": name})
        for (policy, name), value in shown.items():
            self._of_policy.set(value, {"policy": policy, "gauge": name})
        self._shown = set(shown)

    async def keep_reporting(self) -> None:
        """Report the stats at regular intervals until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_SECONDS)
