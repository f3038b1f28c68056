"""A scheduler that is recorded to a file, built like one that is not.

Knows the setting and the clock of the engine; what is recorded, and how it is written, is `watch`.
"""

from collections.abc import Callable
from pathlib import Path

from aioserve.config import SchedulerConfig
from aioserve.engine.clock import LoopLag, is_real
from aioserve.kv_cache import KVCacheManager
from aioserve.scheduler import SchedulerInterface
from aioserve.watch.recorder import RecordingScheduler
from aioserve.watch.writer import LogWriter


def recorded(
    make_scheduler: Callable[..., SchedulerInterface],
) -> Callable[..., SchedulerInterface]:
    """Build the same scheduler, and record it to the file that `decision_log` names."""

    def make(
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> RecordingScheduler:
        assert config.decision_log is not None
        sink = LogWriter(Path(config.decision_log))
        try:
            return RecordingScheduler(
                make_scheduler,
                config,
                kv_cache,
                max_model_len=max_model_len,
                clock=clock,
                sink=sink,
                # On a virtual clock no loop is late, and a timer more could move the others.
                loop_lag=LoopLag() if is_real(clock) else None,
            )
        except BaseException:
            sink.close()
            raise

    return make
