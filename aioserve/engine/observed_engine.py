"""What an engine tells of itself: health, statistics, metrics, what it is doing, what a page shows.

Reads the parts of an engine and changes none of them. Knows no request by name.
"""

import time
from collections import Counter
from typing import Any

import msgspec

from aioserve.config import EngineConfig
from aioserve.engine.builder import EngineParts
from aioserve.engine.client import EngineClientBase
from aioserve.engine.control import Control
from aioserve.engine.live_feed import LiveFeed
from aioserve.engine.metrics import EngineMetrics
from aioserve.engine.policy_trials import PolicyTrials
from aioserve.engine.snapshot import EngineSnapshot, take_snapshot
from aioserve.engine.watchdog import LoopMonitor, StateLog
from aioserve.model_info import ModelInfo
from aioserve.operations.command import Counted, Health, Seen, State
from aioserve.outputs import SchedulerStats
from aioserve.request import WaitReason
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler import FALLBACK_POLICY, BaseScheduler, SchedulerInterface
from aioserve.support.version import __version__


def options_as_labels(
    name: str, policy: type[SchedulerInterface], options: dict[str, Any]
) -> dict[str, str]:
    """A policy with all its options, defaults included."""
    if issubclass(policy, BaseScheduler):
        options = msgspec.to_builtins(policy.parse_options(options))
    return {"policy": name, **{key: str(value) for key, value in options.items()}}


# Seconds for which a policy counts as failing whose last step failed: only a request can show that
# it works again. Enough for a client that asks now and then; a guess.
POLICY_FAILURE_SECONDS = 10.0


class ObservedEngine(EngineClientBase[EngineParts]):
    """The state of an engine in this process, and all that is asked of it without changing it."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.model_info = ModelInfo(self.config.model)
        self.started_at = int(time.time())
        self.max_model_len = 0  # known after start: the setting, or what the KV pool can hold
        self.metrics = EngineMetrics(
            self.get_stats,
            self._get_wait_reasons,
            lambda: 0 if self._parts is None else self._parts.core.loop.failures.count,
            lambda: self.replaced_policy_error is not None,
            lambda: None if self._runner is None else self._runner.num_compute_threads,
            self._get_info,
            lambda: self.state,
        )
        self._pulse = LoopMonitor(
            lambda: self._parts is not None and len(self._parts.output_processor) > 0,
            self.metrics.loop_delays["engine"].observe,
            StateLog(self.get_stats, self.metrics).write,
        )
        self._runner: RunnerInterface | None = None
        self._parts: EngineParts | None = None  # between start and shutdown
        self._control: Control | None = None  # from its first use on
        self._error: BaseException | None = None
        self._is_closing = False
        self._gallery: LiveFeed | None = None  # once a page has asked for it
        self._trials: PolicyTrials | None = None  # once one was requested

    @property
    def errored(self) -> BaseException | None:
        """What killed the engine; None while it lives."""
        return self._error

    @property
    def is_draining(self) -> bool:
        """Whether `shutdown` was called; new requests are then refused."""
        return self._is_closing

    @property
    def policy_error(self) -> Exception | None:
        """What the policy did wrong, if it has run no step since, not in ten seconds; else None.

        Requests of its step failed with this error; the engine goes on, and asks it again.
        """
        parts = self._parts
        if parts is None or parts.core.loop.failures.last is None:
            return None
        error, when = parts.core.loop.failures.last
        return None if parts.clock() - when > POLICY_FAILURE_SECONDS else error

    @property
    def replaced_policy_error(self) -> Exception | None:
        """What the policy did wrong, for which a plain one, first come first served, plans in its
        place until `switch_policy`; None: the policy that is set plans.
        """
        return None if self._parts is None else self._parts.core.loop.failures.replaced_after

    @property
    def first_policy_error(self) -> Exception | None:
        """The first thing that a policy did wrong since the start: figures of such a run are not
        those of the policy alone.
        """
        return None if self._parts is None else self._parts.core.loop.failures.first

    @property
    def state(self) -> State:
        """Whether the engine runs, is paused or sleeps, by an operator's command."""
        return "running" if self._control is None else self._control.state

    def health(self) -> Health:
        """Whether a new request would be served now, and if not, why."""
        if (error := self._error) is not None:
            return Health("dead", f"{type(error).__name__}: {error}")
        if self._is_closing:
            return Health("draining", "the server is shutting down")
        if (parts := self._parts) is None:
            return Health("loading", "the model is being loaded")
        if self.state != "running":
            return Health(self.state, "an operator wants it so")
        seconds = parts.core.step_seconds()
        if seconds > self.config.server.hung_step_seconds:
            return Health("hanging", f"a step has not come back for {seconds:.0f} s")
        if (error := self.replaced_policy_error) is not None:
            plain = "a plain policy, first come first served, plans in the place of"
            return Health("ready", f"{plain} {self.config.scheduler.policy}: {error}")
        if self.policy_error is not None:
            return Health("failing", str(self.policy_error))
        seconds = parts.core.loop.stalled_seconds()
        if seconds > self.config.scheduler.stall_timeout / 2:
            return Health(
                "stalled",
                f"policy {self.config.scheduler.policy} has scheduled no request for "
                f"{seconds:.0f} s although requests wait",
            )
        return Health()

    def get_stats(self) -> SchedulerStats | None:
        """The scheduler's state and totals; None before the start and after the end."""
        return None if self._parts is None else self._parts.core.loop.scheduler.make_stats()

    def inspect(self) -> EngineSnapshot | None:
        """What it is doing now: every request and why it waits, steps in flight, what memory is
        held. None before the start and after the end.
        """
        if (parts := self._parts) is None:
            return None
        is_fallback = parts.core.loop.failures.replaced_after is not None
        policy = FALLBACK_POLICY if is_fallback else self.config.scheduler.policy
        return take_snapshot(parts, policy, self.state, is_fallback=is_fallback)

    def render_metrics(self, counted: list[Counted]) -> bytes:
        """Metrics as Prometheus text; `counted` adds what a server in this process has counted."""
        self.metrics.loop_lags["engine"] = self._pulse.worst()
        if counted:
            self.metrics.counted["engine"] = counted
        return self.metrics.render()

    @property
    def trials(self) -> PolicyTrials:
        """Comparisons of policies on the requests that come. Raises `EngineDeadError` before the
        start and after the end.
        """
        parts = self._alive()
        if self._trials is None:
            self._trials = PolicyTrials(
                parts.core.loop, parts.clock, lambda: self.config, self.max_model_len
            )
        return self._trials

    async def look(self, after: int) -> Seen:
        """See `LiveFeed.look`. Raises `EngineDeadError` before the start and after the end."""
        parts = self._alive()
        if self._gallery is None:
            self._gallery = LiveFeed(
                parts.core.loop, parts.clock, self.metrics, lambda: self.config, self.max_model_len
            )
        return await self._gallery.look(after)

    def _get_info(self) -> dict[str, dict[str, str]]:
        """Settings as metric labels, with all options of the policy."""
        model, parts = self.config.model, self._parts
        info = {
            "model": {
                "model": model.served_name,
                "max_model_len": str(self.max_model_len),
                "block_size": str(self.config.cache.block_size),
                "version": __version__,
                "activations": model.activations or "exact",
            }
        }
        if parts is not None:
            settings, policy = self.config.scheduler, parts.core.loop.scheduler.policy
            if parts.core.loop.failures.replaced_after is not None:
                info["policy"] = options_as_labels(FALLBACK_POLICY, policy, {})
            else:
                info["policy"] = options_as_labels(settings.policy, policy, settings.options)
            name, given = self.config.shadow.shadow_policy, self.config.shadow.shadow_options
            if name is not None and (shadow := self.metrics.shadow.shadow) is not None:
                info["shadow_policy"] = options_as_labels(name, shadow.scheduler.policy, given)
        return info

    def _get_wait_reasons(self) -> Counter[WaitReason]:
        parts = self._parts
        return Counter(
            () if parts is None else parts.core.loop.scheduler.get_wait_reasons().values()
        )
