"""Frames of the scheduler at work, some per second, while a browser is subscribed.

Lets a `FeedObserver` observe the step loop when the first browser comes, and takes it away when the
last has gone. A frame is encoded once for all; a browser that is too slow gets a snapshot instead,
so none has a queue. Knows no HTTP: a look is a question, from here or from another process.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from aioserve.config import EngineConfig
from aioserve.decision_log.delegate import innermost
from aioserve.engine.clock import Clock, LoopLag
from aioserve.engine.core import EngineLoop
from aioserve.engine.observe.feed_observer import FeedObserver
from aioserve.engine.observe.frames import (
    About,
    Frame,
    Gauges,
    Histograms,
    Lease,
    Shadow,
    Snapshot,
)
from aioserve.engine.observe.metrics import EngineMetrics, Latencies
from aioserve.engine.observe.shadow_metrics import ShadowMetrics
from aioserve.engine.observe.shown_id import shown_id
from aioserve.errors import EngineDeadError, RequestError
from aioserve.operations.command import Seen
from aioserve.scheduler import BaseScheduler, SchedulerInterface
from aioserve.scheduler.registry import OptionField, describe_options, describe_policies
from aioserve.support.version import __version__

FRAME_SECONDS = 1 / 15  # as often as an eye can follow
QUIET_SECONDS = 1.0  # between two frames while nothing happens
AWAY_SECONDS = 3.0  # a page that has not asked for this long has gone
SHADOW_SECONDS = 1.0  # between two tellings of the shadow
MAX_LEASES = 8  # of which a frame tells one by one
NUM_KEPT = 30  # frames, two seconds: for a page that was held up

_encoder = msgspec.json.Encoder()


class LiveFeed:
    """Broadcasts scheduler frames to the browsers that watch one engine; called on its loop."""

    def __init__(
        self,
        loop: EngineLoop,
        clock: Clock,
        metrics: EngineMetrics,
        config: Callable[[], EngineConfig],
        max_model_len: int,
    ) -> None:
        """`config` is asked each time: the policy may have changed."""
        self._loop = loop
        self._clock = clock
        self._metrics = metrics
        self._config = config
        self._max_model_len = max_model_len
        self._policies: dict[str, str] | None = None  # that are installed; read once
        self._options: dict[str, list[OptionField]] = {}  # of these
        self._onlooker: FeedObserver | None = None
        self._unix_time = 0.0  # when that was put in its place, seconds since 1970
        self._loop_lag = LoopLag()
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=NUM_KEPT)
        self._number = 0  # of the last frame
        self._gauges: Gauges
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._num_looking = 0  # pages that wait for the next frame
        self._last_look = self._last_frame = self._last_shadow = 0.0
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether a page is taken to look."""
        return self._onlooker is not None

    async def look(self, after: int) -> Seen:
        """The frames after that number, at least one; a snapshot if they are not kept, and for 0.
        Raises `RequestError` where there is nothing to look at, and `EngineDeadError` when the
        engine ends.
        """
        if self._policies is None:
            self._options = await asyncio.to_thread(describe_options)
            self._policies = await asyncio.to_thread(describe_policies)
        self._last_look = self._clock()
        if self._is_closed:
            raise EngineDeadError("the engine is shutting down")
        if self._onlooker is None:
            self._open()
        elif after == self._number:
            await self._wait()
        onlooker = self._onlooker
        if onlooker is None:
            raise EngineDeadError("the engine is shutting down")
        if onlooker.error is not None:
            raise RequestError(f"watching the scheduler has failed: {onlooker.error!r}")
        if after and self._frames and self._frames[0][0] - 1 <= after < self._number:
            return Seen(self._number, [data for number, data in self._frames if number > after])
        self._make_frame(onlooker)  # what it tells is in the snapshot, and not in the next
        return Seen(self._number, [self._snapshot(onlooker, self._policies)])

    def close(self) -> None:
        """Refuse new viewers, as the engine ends. Idempotent."""
        self._is_closed = True
        self._take_away()

    def _take_away(self) -> None:
        if self._onlooker is not None:
            self._loop.observers.unsubscribe(self._onlooker)
        self._onlooker = self._metrics.latencies = None
        self._frames.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _open(self) -> None:
        policy = innermost(self._loop.scheduler)
        if not isinstance(policy, BaseScheduler):
            raise RequestError(
                f"policy {type(policy).__name__} does not derive from BaseScheduler: what it does "
                "cannot be watched"
            )
        self._onlooker = FeedObserver(lambda: self._loop.scheduler, policy, self._clock)
        self._loop.observers.subscribe(self._onlooker)
        self._metrics.latencies = Latencies()
        self._unix_time = time.time()
        self._set_timer()

    async def _wait(self) -> None:
        """Until there is another frame, or an end."""
        self._num_looking += 1
        try:
            await asyncio.shield(self._next)
        finally:
            self._num_looking -= 1
            self._last_look = self._clock()

    def _wake(self) -> None:
        self._next.set_result(None)
        self._next = asyncio.get_running_loop().create_future()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(FRAME_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        assert self._onlooker is not None
        now = self._clock()
        if not self._num_looking and now - self._last_look > AWAY_SECONDS:
            self._take_away()
            return
        is_quiet = not self._onlooker.has_events
        if not is_quiet or now - self._last_frame >= QUIET_SECONDS:
            self._make_frame(self._onlooker)
        self._set_timer()

    def _make_frame(self, onlooker: FeedObserver) -> None:
        self._number += 1
        self._last_frame = now = self._clock()
        shadow = None
        if now - self._last_shadow >= SHADOW_SECONDS:
            self._last_shadow = now
            shadow = self._shadow()
        self._gauges = self._measure(onlooker)
        frame = Frame(
            number=self._number,
            now=onlooker.since_began(self._clock()),
            events=onlooker.take_events(),
            gauges=self._gauges,
            shadow=shadow,
        )
        self._frames.append((self._number, _encoder.encode(frame)))
        self._wake()

    def _snapshot(self, onlooker: FeedObserver, policies: dict[str, str]) -> bytes:
        config = self._config()
        requests, rows = onlooker.picture()
        about = About(
            version=__version__,
            model=config.model.served_name,
            policy=config.scheduler.policy,
            options=config.scheduler.options,
            policies=policies,
            policy_options=self._options,
            is_simulated=config.runner.runner == "simulated",
            max_num_seqs=config.scheduler.max_num_seqs,
            num_blocks=onlooker.pool.num_blocks,
            block_size=config.cache.block_size,
            max_model_len=self._max_model_len,
            unix_time=self._unix_time,
        )
        snapshot = Snapshot(
            number=self._number,
            now=onlooker.since_began(self._clock()),
            about=about,
            requests=requests,
            rows=rows,
            gauges=self._gauges,
            shadow=self._shadow(),
        )
        return _encoder.encode(snapshot)

    def _measure(self, onlooker: FeedObserver) -> Gauges:
        num_running, num_waiting = self._loop.scheduler.get_request_counts()
        pool, latencies = onlooker.pool, self._metrics.latencies
        leases = onlooker.kv_cache.leases
        policy = innermost(self._loop.scheduler)
        first_tokens, gaps = ([], []) if latencies is None else latencies.take()
        return Gauges(
            loop_lag=round(1e3 * self._loop_lag(), 2),
            num_running=num_running,
            num_waiting=num_waiting,
            num_used_blocks=pool.num_used_blocks,
            num_leased_blocks=leases.num_held_blocks if leases else 0,
            num_leases=len(leases),
            leases=_leases(policy, onlooker),
            num_cached_blocks=pool.num_free_blocks - pool.num_unused_blocks,
            num_free_blocks=pool.num_unused_blocks,
            num_output_tokens=self._metrics.num_generation_tokens,
            step_limit=policy.step_limit if isinstance(policy, BaseScheduler) else 0,
            of_policy=policy.read_gauges() if isinstance(policy, BaseScheduler) else {},
            first_tokens=first_tokens,
            gaps=gaps,
        )

    def _shadow(self) -> Shadow | None:
        metrics, settings = self._metrics, self._config().shadow
        if (shadow := metrics.shadow.shadow) is None or settings.shadow_policy is None:
            return None
        stats = shadow.scheduler.make_stats()
        return Shadow(
            policy=settings.shadow_policy,
            bounds=list(metrics.request_latency.bounds),
            live=_histograms(metrics),
            shadow=_histograms(metrics.shadow),
            num_running=stats.num_running_reqs,
            num_waiting=stats.num_waiting_reqs,
            num_preemptions=stats.num_preemptions,
            num_resets=shadow.stats.num_resets,
            is_failed=shadow.stats.is_failed,
        )


def _leases(policy: SchedulerInterface, onlooker: FeedObserver) -> list[Lease]:
    """The newest leases of the policy, at most `MAX_LEASES`; empty for another scheduler."""
    if not isinstance(policy, BaseScheduler):
        return []
    size = policy.kv_cache.block_size
    return [
        Lease(user, shown_id(name), num_tokens // size, onlooker.since_began(until))
        for user, name, num_tokens, until in policy.memory.leases(MAX_LEASES)
    ]


def _histograms(metrics: EngineMetrics | ShadowMetrics) -> Histograms:
    return Histograms(
        first_token=list(metrics.time_to_first_token.counts),
        gap=list(metrics.inter_token_latency.counts),
        whole=list(metrics.request_latency.counts),
    )
