"""A timer that beats while there are requests: how late the loop is, and the state for the log.

None runs while there are no requests: an idle engine costs nothing. Knows what to call; not why.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from aioserve.engine.observe.histogram import RecentWorst
from aioserve.engine.observe.metrics import EngineMetrics
from aioserve.outputs import SchedulerStats

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.1
STATE_SECONDS = 10.0  # between two lines


class LoopMonitor:
    """Of one process, on its loop; for real time only."""

    def __init__(
        self,
        is_busy: Callable[[], bool],
        on_delay: Callable[[float], None],
        on_state: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`on_delay` is told at each beat by how many seconds it is late, `on_state` how many
        seconds have passed since it was called last, or since the work began.
        """
        self._is_busy = is_busy
        self._on_delay = on_delay
        #: The worst delay of the last minute, in seconds.
        self.worst = RecentWorst()
        self._on_state = on_state
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._since = 0.0

    def start(self) -> None:
        """There is work. Does nothing if that was known."""
        if self._timer is None:
            self._since = time.monotonic()
            self._set()

    def stop(self) -> None:
        """Stop the timer if it runs. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._due = time.monotonic() + BEAT_SECONDS
        self._timer = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        delay = max(now - self._due, 0.0)
        self.worst.observe(delay)
        self._on_delay(delay)
        if now - self._since >= STATE_SECONDS:
            self._on_state(now - self._since)
            self._since = now
        self._timer = None
        if self._is_busy():
            self._set()


class StateLog:
    """The line that says how things stand."""

    def __init__(
        self, get_stats: Callable[[], SchedulerStats | None], metrics: EngineMetrics
    ) -> None:
        self._get_stats = get_stats
        self._metrics = metrics
        self._last = (0, 0)  # tokens of prompts and outputs that were told

    def write(self, seconds: float) -> None:
        """Log the state of the engine, and tokens per second over the last `seconds`."""
        stats = self._get_stats()
        if stats is None:
            return
        now = (self._metrics.num_prompt_tokens, self._metrics.num_generation_tokens)
        prompt, output = (count - before for count, before in zip(now, self._last, strict=True))
        self._last = now
        logger.info(
            "%d running, %d waiting; %.0f prompt and %.0f output tokens/s; KV cache %.0f%% in use, "
            "%.0f%% of prompt tokens were cached; %d preemptions",
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            prompt / seconds,
            output / seconds,
            100 * stats.kv_cache_usage,
            100 * stats.prefix_hit_rate,
            stats.num_preemptions,
        )
