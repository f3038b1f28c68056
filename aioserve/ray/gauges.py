"""A replica's state among Ray's own metrics, where its dashboards and Prometheus find it.

Ray adds the replica and the deployment as labels. What a front end counts is not here.
"""

import asyncio
from collections.abc import Callable

import msgspec
from ray.util.metrics import Gauge

from aioserve.outputs import SchedulerStats

REPORT_SECONDS = 5.0  # Ray collects what there is every ten


class StatsGauges:
    """A gauge per field of `SchedulerStats`, and for the two shares that follow from them."""

    def __init__(self, get_stats: Callable[[], SchedulerStats | None]) -> None:
        self._get_stats = get_stats
        names = (*SchedulerStats.__struct_fields__, "kv_cache_usage", "prefix_hit_rate")
        self._gauges = {name: Gauge(f"aioserve_{name}") for name in names}

    def report(self) -> None:
        """Set them to what there is now."""
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

    async def keep_reporting(self) -> None:
        """Report the stats at regular intervals until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_SECONDS)
