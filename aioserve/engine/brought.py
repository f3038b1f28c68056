"""What parts bring to the engine, as the engine sees it: loaded when the settings want it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from prometheus_client import CollectorRegistry

from aioserve.config import CacheConfig, EngineConfig, SchedulerConfig
from aioserve.engine.clock import Clock, LoopLag
from aioserve.kv_cache import KVCacheManager, KVConnectorBase
from aioserve.model_source.info import ModelInfo
from aioserve.runner.info import RunnerInfo
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler import SchedulerInterface
from aioserve.support.parts import load

if TYPE_CHECKING:
    from aioserve.engine.core import OutputSink
    from aioserve.engine.metric_families import Histogram
    from aioserve.engine.operations.command import Report
    from aioserve.engine.step_loop import StepLoop
    from aioserve.engine.stream import SampleState


class ShadowMetrics(Protocol):
    """What another policy would have done with the requests that come."""

    shadow: Any  # None: there is none
    time_to_first_token: "Histogram"
    inter_token_latency: "Histogram"
    request_latency: "Histogram"


class KVConnectorMetrics(Protocol):
    """What a KV connector does, for metrics."""

    connector: KVConnectorBase | None  # set once it is made


class ShadowTurns(Protocol):
    """What gives a shadow its turns beside live steps."""

    def close(self) -> None:
        """Give it no more turns."""


class Shadows(Protocol):
    """Makes the shadow that settings ask for, and has it follow the live step loop."""

    def follow(
        self,
        loop: "StepLoop[Any]",
        config: EngineConfig,
        info: RunnerInfo,
        max_model_len: int,
        before: ShadowTurns | None = None,
    ) -> ShadowTurns | None:
        """Have the shadow of `config`, or none, observe `loop` in the place of `before`. Raises
        `ConfigError` or `PolicyError` before anything has changed.
        """


class PolicyTrials(Protocol):
    """Comparisons of policies on the requests that come."""

    async def try_policy(
        self, settings: SchedulerConfig, seconds: float | None, num_requests: int | None
    ) -> "Report":
        """Record what comes, and compare what there is with `settings` on it."""

    def find(self, report_id: str) -> bytes | None:
        """Return a report, in HTML; None if it was never made, or is forgotten."""


def shadow_metrics(registry: CollectorRegistry) -> ShadowMetrics:
    """Return the metrics of a shadow policy, registered."""
    return cast(ShadowMetrics, load("engine", "shadow metrics")(registry))


def make_shadows(
    config: EngineConfig, model_info: ModelInfo, clock: Clock, metrics: ShadowMetrics
) -> Shadows:
    """`clock` is the live scheduler's. Raises `ConfigError` for a shadow that cannot work."""
    return cast(Shadows, load("engine", "shadows")(config, model_info, clock, metrics))


def shadow_settings(config: EngineConfig) -> SchedulerConfig | None:
    """Return the live scheduler's settings with the shadow's policy; None without a shadow."""
    if config.shadow.shadow_policy is None:
        return None
    return cast(SchedulerConfig, load("engine", "shadow settings")(config))


def make_trials(
    loop: "StepLoop[Any]", clock: Clock, config: Callable[[], EngineConfig], max_model_len: int
) -> PolicyTrials:
    """`config` is asked each time: the policy may have changed."""
    return cast(PolicyTrials, load("engine", "policy trials")(loop, clock, config, max_model_len))


def recorded(
    make_policy: Callable[..., SchedulerInterface],
    settings: SchedulerConfig,
    kv_cache: KVCacheManager,
    *,
    max_model_len: int,
    clock: Clock,
    loop_lag: LoopLag | None,
) -> SchedulerInterface:
    """Return a scheduler whose decisions are written to `settings.decision_log`."""
    record = load("engine", "decision log")
    scheduler: SchedulerInterface = record(
        make_policy,
        settings,
        kv_cache,
        max_model_len=max_model_len,
        clock=clock,
        loop_lag=loop_lag,
    )
    return scheduler


def kv_connector_metrics(registry: CollectorRegistry) -> KVConnectorMetrics:
    """Return the metrics of a KV connector, registered."""
    return cast(KVConnectorMetrics, load("engine", "KV connector metrics")(registry))


def check_connector(config: EngineConfig, policy: type[SchedulerInterface]) -> None:
    """Raises `ConfigError` for what a connector cannot go along with, before anything is loaded."""
    if config.cache.kv_connector != "none":
        load("engine", "KV connector check")(config, policy)


def make_connector(
    config: EngineConfig,
    model_info: ModelInfo,
    runner: RunnerInterface,
    metrics: Callable[[], KVConnectorMetrics],
) -> KVConnectorBase | None:
    """Return the connector of the settings, for a runner that is loaded; None: there is to be none.
    `metrics` gives what `kv_connector_metrics` made. Raises `ConfigError`.
    """
    if config.cache.kv_connector == "none":
        return None
    make = load("engine", "KV connector")
    return cast(KVConnectorBase | None, make(config, model_info, runner, metrics()))


def held_back(
    sink: "OutputSink",
    connector: KVConnectorBase,
    reader_of: "Callable[[str], SampleState | None]",
    config: CacheConfig,
) -> "OutputSink":
    """Delivery that tells the ends of handed-over requests when their blocks can be found."""
    return cast("OutputSink", load("engine", "held ends")(sink, connector, reader_of, config))
