"""A second policy on the live traffic, in virtual time: what would it have done?

Observes the live step loop and changes nothing there. The shadow has block ids of its own and no
tensors; its steps take the time that a model learned from the live ones predicts.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioserve.config import EngineConfig, SchedulerConfig
from aioserve.engine.builder import make_kv_cache
from aioserve.engine.clock import Clock
from aioserve.engine.exposition import scheduler_metrics
from aioserve.engine.metrics import Histogram
from aioserve.engine.step_loop import StepLoop, StepObserver
from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import FinishReason, ModelRunnerOutput
from aioserve.request import ROW_VALUES, Request, RequestStatus, invented
from aioserve.runner.interface import RunnerInfo
from aioserve.scheduler import BaseScheduler, OnlineStepTime, SchedulerOutput, load_policy
from aioserve.scheduler.blame import blamed

logger = logging.getLogger(__name__)

# The shadow lives this many seconds behind, so that most replies' lengths are known when it
# needs them. A guess: long enough for chats; a longer reply is assumed to go on.
LAG_SECONDS = 5.0
# Further behind than this, it gives up on what it has and starts anew: its cost is bounded, so a
# live server that leaves it too little time must not make it grow.
MAX_BEHIND_SECONDS = 30.0
# The longest that one call may hold the event loop, in seconds.
SLICE_SECONDS = 0.001
# What it did not need it cannot save up for later: a share is a share of every moment.
MAX_CREDIT_SECONDS = 0.01
UNKNOWN_TOKEN = 0  # where the shadow is ahead of the live reply
WHOLE_REPLIES = (FinishReason.STOP, FinishReason.LENGTH)


class ShadowObserver(Protocol):
    """An observer that counts what happens in the shadow; times in seconds."""

    def on_first_token(self, seconds: float) -> None: ...
    def on_gap(self, seconds: float) -> None: ...
    def on_finished(self, seconds: float) -> None: ...


class ShadowStats(msgspec.Struct, kw_only=True):
    """The state of the shadow itself; totals since the start."""

    cost_seconds: float = 0.0  # of the event loop
    num_resets: int = 0  # how often it was too far behind
    is_failed: bool = False  # its policy raised: it is off
    num_steps: int = 0


class Shadow:
    """A shadow of the live requests in another scheduler, up to `LAG_SECONDS` ago."""

    def __init__(
        self,
        make_scheduler: Callable[[Callable[[], float]], BaseScheduler],
        observer: ShadowObserver,
        *,
        max_share: float,
    ) -> None:
        """`make_scheduler` gets the shadow's clock; `max_share`: the share of time it may take."""
        self.stats = ShadowStats()
        self.step_time = OnlineStepTime()
        self._make_scheduler = make_scheduler
        self._observer = observer
        self._max_share = max_share
        self._credit = 0.0  # seconds that it may take now
        self._credited_at = 0.0
        self._num_followed = 0
        self._reset()

    def _reset(self) -> None:
        self.now = 0.0  # virtual: the same axis as the live clock, some seconds behind
        self.scheduler = self._make_scheduler(lambda: self.now)
        self._events: deque[tuple[float, Request, bool]] = deque()  # (when, live, has it left?)
        # Ids of its own: a live one may come again before the shadow is done with it.
        self._ids: dict[Request, str] = {}
        self._live: dict[str, Request] = {}
        self._last_token: dict[str, float] = {}
        self._loop: StepLoop[float] = StepLoop(  # a step's handle is when it ends
            self.scheduler, depth=1, clock=lambda: self.now, raises=True
        )

    @property
    def has_work(self) -> bool:
        """Whether anything is left to follow, now or once the lag has passed."""
        return not self.stats.is_failed and bool(self._events or self._live)

    def note(self, now: float, request: Request, *, left: bool = False) -> None:
        """Note that a live request came, or that its client left."""
        if self.stats.is_failed:
            return
        if self._events and now - self._events[0][0] > LAG_SECONDS + MAX_BEHIND_SECONDS:
            self._begin_anew()
        self._events.append((now, request, left))

    def advance(self, now: float) -> None:
        """Live up to `LAG_SECONDS` before `now`, as far as slice and share of time allow. Called
        while a step computes, never on the way to one.
        """
        self._credit += self._max_share * (now - self._credited_at)
        self._credit = min(self._credit, MAX_CREDIT_SECONDS)
        self._credited_at = now
        if self.stats.is_failed or self._credit <= 0:
            return
        started = time.perf_counter()
        try:
            self._run(now - LAG_SECONDS, started + SLICE_SECONDS)
        except Exception:
            logger.exception("the shadow policy failed; it is off from now on")
            self.stats.is_failed = True
        cost = time.perf_counter() - started
        self.stats.cost_seconds += cost
        self._credit -= cost

    def _begin_anew(self) -> None:
        self.stats.num_resets += 1
        self._reset()

    def _run(self, horizon: float, stop_at: float) -> None:
        while time.perf_counter() < stop_at:
            event_time = self._events[0][0] if self._events else horizon + 1
            in_flight = self._loop.in_flight
            step_end = in_flight[0].handle if in_flight else horizon + 1
            if min(event_time, step_end) > horizon:
                return
            if horizon - min(event_time, step_end) > MAX_BEHIND_SECONDS:
                self._begin_anew()
                return
            if event_time <= step_end:
                self.now = max(self.now, event_time)
                self._take_event()
            else:
                self.now = step_end
                self._finish_step()
            if not in_flight:
                self._plan_step()

    def _take_event(self) -> None:
        _, live, left = self._events.popleft()
        if left:
            if (request_id := self._ids.get(live)) is not None:
                self._loop.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
                self._forget(request_id)
            return
        self._num_followed += 1
        shadow_id = f"shadow-{self._num_followed}"
        spec = live.spec.without_arrays()  # it may live longer, and has no encoder
        request = Request(msgspec.structs.replace(spec, request_id=shadow_id))
        request.stop_token_ids = frozenset()  # it ends where the live one did
        self._loop.add_request(request)
        self._ids[live] = request.request_id
        self._live[request.request_id] = live

    def _plan_step(self) -> None:
        for request_id in self._loop.expire_requests():
            self._forget(request_id)
        for step in self._loop.fill():
            if step.output.total_num_scheduled_tokens:
                self.stats.num_steps += 1
                step.handle = self.now + self.step_time.seconds_of(step.output)
            else:  # it tells a runner which requests left; here is no runner
                step.handle = self.now
        while self._loop.failed:  # rejected: other failures are raised
            for request_id in self._loop.failed.pop()[0] or ():
                self._forget(request_id)

    def _finish_step(self) -> None:
        output = self._loop.in_flight[0].output
        sampled = []
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.get_request(request_id)
            is_sampling = (
                request is not None
                and request.pooling_params is None
                and request.num_computed_tokens >= request.num_tokens
            )
            sampled.append([self._token(request)] if is_sampling and request is not None else [])
        values = {
            request_id: invented(names, request_id, request.num_tokens)
            for request_id, names in output.parts.get(ROW_VALUES, {}).items()
            if (request := self.scheduler.get_request(request_id)) is not None
        }
        result = ModelRunnerOutput(list(output.num_scheduled_tokens), sampled, row_values=values)
        self._loop.take(result)
        for request_id, token_ids in zip(output.num_scheduled_tokens, sampled, strict=True):
            if request_id not in self._live:
                continue
            if token_ids:
                self._on_token(request_id)
            elif self.scheduler.get_request(request_id) is None:  # it was pooled
                self._on_end(request_id)

    def _token(self, request: Request) -> int:
        live = self._live[request.request_id]
        return (
            live.token_ids[request.num_tokens]
            if request.num_tokens < live.num_tokens
            else UNKNOWN_TOKEN
        )

    def _on_token(self, request_id: str) -> None:
        live = self._live[request_id]
        last = self._last_token.get(request_id)
        if last is None:
            self._observer.on_first_token(self.now - live.arrival_time)
        else:
            self._observer.on_gap(self.now - last)
        self._last_token[request_id] = self.now
        request = self.scheduler.get_request(request_id)
        if (
            request is not None
            and live.status.is_finished
            and request.num_tokens >= live.num_tokens
        ):
            self._loop.finish_requests([request_id], RequestStatus.FINISHED_STOPPED)
            request = None
        if request is None:
            self._on_end(request_id)

    def _on_end(self, request_id: str) -> None:
        self._observer.on_finished(self.now - self._live[request_id].arrival_time)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            del self._ids[live]
        self._last_token.pop(request_id, None)


class ShadowFeed(StepObserver):
    """A feed of the live requests to a shadow: when they came, and when their clients
    left.
    """

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._requests: dict[str, Request] = {}

    def on_added(self, request: Request, now: float) -> None:
        self._requests[request.request_id] = request
        self._shadow.note(now, request)

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        self._shadow.step_time.planned(output, now)

    def on_back(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        self._shadow.step_time.returned(output, now)

    def on_ended(self, request_ids: list[str], reason: FinishReason, now: float) -> None:
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            # A reply that came to its end has its length; the rest left early.
            if request is not None and reason not in WHOLE_REPLIES:
                self._shadow.note(now, request, left=True)


# What the shadow policy would have done, as Prometheus metrics.


class ShadowMetrics(Collector):
    """The metrics of what the shadow policy would have done. Compare with the metrics of the same
    names without `shadow`; those count from the arrival to the delivery, these to the end of the
    step.
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


# The shadow of a live engine: made from settings, switched, and given its turns beside live steps.


# How often a shadow that is behind gets a slice of an engine that is idle. A guess.
TICK_SECONDS = 0.02


class ShadowTurns(ShadowFeed):
    """The turns in which a shadow is fed and advances: at the end of each turn of the live engine,
    and from a timer while it has work left.
    """

    def __init__(self, shadow: Shadow, clock: Callable[[], float]) -> None:
        """`clock` is the live scheduler's, in seconds."""
        super().__init__(shadow)
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def on_turn_end(self, now: float) -> None:
        if self._is_closed:
            return
        self._shadow.advance(now)
        if self._timer is None and self._shadow.has_work:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._on_timer)

    def close(self) -> None:
        """Stop the turns of the shadow policy."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.on_turn_end(self._clock())


def load_shadow_policy(settings: SchedulerConfig, max_model_len: int) -> type[BaseScheduler]:
    """Return the class of the shadow policy of `settings`; `max_model_len` is in tokens. Raises
    `ConfigError` if the policy, its options or limits cannot work in a shadow.
    """
    policy = load_policy(settings.policy)
    if not issubclass(policy, BaseScheduler):
        raise ConfigError(f"shadow policy {settings.policy!r} must derive from BaseScheduler")
    if policy.sets_frequency:
        raise ConfigError(
            f"shadow policy {settings.policy!r} sets the card's clock, but the steps of a shadow "
            "take as long as live ones: compare the policy (python -m aioserve compare)"
        )
    policy.parse_options(settings.options)
    policy.check_limits(settings, max_model_len)
    return policy


class ShadowBuilder:
    """A builder of the shadow that settings ask for, which follows the live step loop."""

    def __init__(
        self, config: EngineConfig, model_info: ModelInfo, clock: Clock, metrics: ShadowMetrics
    ) -> None:
        """`clock` is the live scheduler's. Raises `ConfigError` for a policy that cannot work."""
        self._model_info, self._clock, self._metrics = model_info, clock, metrics
        self._load(config)

    def follow(
        self,
        loop: StepLoop[Any],
        config: EngineConfig,
        info: RunnerInfo,
        max_model_len: int,
        before: ShadowTurns | None = None,
    ) -> ShadowTurns | None:
        """Have the shadow of `config`, or none, observe `loop` in the place of `before`. Raises
        `ConfigError` or `PolicyError` before anything has changed. The shadow is not told of the
        requests that are there.
        """
        shadow = self._make(config, info, max_model_len)
        if before is not None:
            before.close()
            loop.observers.unsubscribe(before)
        self._metrics.begin(shadow)
        if shadow is None:
            return None
        turns = ShadowTurns(shadow, self._clock)
        loop.observers.subscribe(turns)
        return turns

    def _load(self, config: EngineConfig) -> type[BaseScheduler] | None:
        """Raises `ConfigError` if the policy cannot work."""
        settings = shadow_settings(config)
        if settings is None:
            return None
        return load_shadow_policy(settings, self._model_info.max_model_len)

    def _make(self, config: EngineConfig, info: RunnerInfo, max_model_len: int) -> Shadow | None:
        policy, settings = self._load(config), shadow_settings(config)
        if policy is None or settings is None:
            return None

        def make_scheduler(clock: Clock) -> BaseScheduler:
            kv_cache = make_kv_cache(config.cache, info)
            with blamed(policy, "__init__()"):
                return policy(settings, kv_cache, max_model_len=max_model_len, clock=clock)

        return Shadow(make_scheduler, self._metrics, max_share=config.shadow.shadow_max_share)


def shadow_settings(config: EngineConfig) -> SchedulerConfig | None:
    """Return the live scheduler's settings with the shadow's policy; None without a shadow."""
    shadow = config.shadow
    if shadow.shadow_policy is None:
        return None
    return msgspec.structs.replace(
        config.scheduler,
        policy=shadow.shadow_policy,
        options=shadow.shadow_options,
        decision_log=None,
    )
