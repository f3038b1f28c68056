"""The shadow of a live engine: made from settings, switched, and given its turns beside live steps.

Knows settings, policies and the event loop. Knows nothing of what a shadow does with its time.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from aioserve.config import EngineConfig, SchedulerConfig
from aioserve.engine.clock import Clock
from aioserve.engine.kv_cache import make_kv_cache
from aioserve.engine.observe.shadow import Shadow, ShadowFeed
from aioserve.engine.observe.shadow_metrics import ShadowMetrics
from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo
from aioserve.runner.info import RunnerInfo
from aioserve.scheduler import BaseScheduler, load_policy
from aioserve.scheduler.blame import blamed
from aioserve.step_loop import StepLoop

# How often a shadow that is behind gets a slice of an engine that is idle. A guess.
TICK_SECONDS = 0.02


class ShadowTurns(ShadowFeed):
    """Feeds a shadow, and lets it advance: at the end of each turn of the live engine, and from a
    timer while it has work left.
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


class ShadowBuilder:
    """Makes the shadow that settings ask for, and has it follow the live step loop."""

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
        policy = load_policy(settings.policy)
        if not issubclass(policy, BaseScheduler):
            raise ConfigError(f"shadow policy {settings.policy!r} must derive from BaseScheduler")
        policy.parse_options(settings.options)
        policy.check_limits(settings, self._model_info.max_model_len)
        return policy

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
    """The live scheduler's settings with the shadow's policy; None without a shadow."""
    shadow = config.shadow
    if shadow.shadow_policy is None:
        return None
    return msgspec.structs.replace(
        config.scheduler,
        policy=shadow.shadow_policy,
        options=shadow.shadow_options,
        decision_log=None,
    )
