"""What a replica on Ray says of itself to routers, from the statistics of its scheduler.

Cached prefixes among the free KV blocks are not counted there, and are reported as not known.
"""

from collections.abc import Callable, Iterable

from aioserve.config import EngineConfig
from aioserve.outputs import SchedulerStats
from aioserve.routing import ReplicaReport, StepTimes

KEPT = 0.5  # weight of the mean of step times beside the newest interval of steps


class Reporter:
    """Makes the reports of one replica."""

    def __init__(
        self,
        config: EngineConfig,
        get_stats: Callable[[], SchedulerStats | None],
        clock: Callable[[], float],
        get_adapters: Callable[[], Iterable[str]] = lambda: (),
    ) -> None:
        """`get_adapters` gives the names of the LoRA adapters that are in memory."""
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._block_size = config.cache.block_size
        self._get_stats = get_stats
        self._clock = clock
        self._last: tuple[float, int] | None = None  # time and steps, while requests ran
        self._step_seconds = 0.0
        self._step_times = StepTimes()
        self._get_adapters = get_adapters

    def make(self) -> ReplicaReport | None:
        """The state now; None before the engine has started and after its end."""
        stats = self._get_stats()
        if stats is None:
            return None
        self._learn(stats)
        base, each = self._step_times.line()
        return ReplicaReport(
            num_running=stats.num_running_reqs,
            num_waiting=stats.num_waiting_reqs,
            num_waiting_tokens=stats.num_waiting_tokens,
            max_num_seqs=self._max_num_seqs,
            num_kv_tokens=stats.num_kv_blocks * self._block_size,
            num_free_kv_tokens=(stats.num_kv_blocks - stats.num_used_kv_blocks) * self._block_size,
            step_seconds=self._step_seconds,
            step_base_seconds=base,
            step_request_seconds=each,
            adapters=tuple(sorted(self._get_adapters())),
        )

    def _learn(self, stats: SchedulerStats) -> None:
        """What a step took between two reports in which requests ran."""
        last, now = self._last, self._clock()
        self._last = (now, stats.num_steps) if stats.num_running_reqs else None
        if last is None or self._last is None or stats.num_steps <= last[1]:
            return
        seconds = (now - last[0]) / (stats.num_steps - last[1])
        self._step_times.learn(stats.num_running_reqs, seconds, stats.num_steps - last[1])
        kept = KEPT if self._step_seconds else 0.0
        self._step_seconds = kept * self._step_seconds + (1 - kept) * seconds
