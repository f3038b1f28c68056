"""A second policy beside the one that decides in vLLM: what it would have done with the traffic.

    --additional-config '{"aioserve": {"shadow": {"policy": "fair", "file": "shadow.prom"}}}'

Beside `Scheduler`, or by `Recorder` beside vLLM's own. vLLM's metrics are made in another process
than its scheduler, so those of the shadow, with the same ones of the policy that decides, go into a
file in Prometheus' text format once a second, for the node exporter's textfile collector or a look.
The shadow itself is that of aioserve's own engine; here a thread gives it its turns.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioserve.config import SchedulerConfig
from aioserve.config.load import convert
from aioserve.engine.metrics import Histogram
from aioserve.engine.step_loop import StepObserver
from aioserve.errors import ConfigError
from aioserve.kv_cache import KVCacheManager
from aioserve.lab.shadow import Shadow, ShadowFeed, ShadowMetrics, load_shadow_policy
from aioserve.outputs import FinishReason, ModelRunnerOutput
from aioserve.request import Request
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.scheduler.blame import blamed

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.02  # between two turns of a shadow that is behind
WRITE_SECONDS = 1.0  # between two versions of the file


class ShadowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a shadow: what is stated under `shadow` for vLLM."""

    policy: str
    file: str  # of metrics, written anew once a second
    options: dict[str, Any] = {}
    max_share: float = 0.05  # most of the time that the shadow may take, 0 to 1


class ShadowBeside(StepObserver):
    """A shadow beside vLLM: it is fed with what happens there, the same is measured of what decides
    there, and both are written down. It may be told from one thread; its own thread works between
    the calls.
    """

    def __init__(
        self,
        settings: ShadowSettings,
        live: SchedulerConfig,
        make_kv_cache: Callable[[], KVCacheManager],
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        """`live` has the limits, which the shadow shares. Raises `ConfigError` for a policy that
        cannot work, or a file that cannot be written.
        """
        own = msgspec.structs.replace(
            live, policy=settings.policy, options=settings.options, decision_log=None
        )
        policy = load_shadow_policy(own, max_model_len)

        def make_scheduler(shadow_clock: Callable[[], float]) -> BaseScheduler:
            with blamed(policy, "__init__()"):
                return policy(own, make_kv_cache(), max_model_len=max_model_len, clock=shadow_clock)

        self._clock, self._path = clock, Path(settings.file)
        self._registry = CollectorRegistry()
        metrics = ShadowMetrics(self._registry)
        self.shadow = Shadow(make_scheduler, metrics, max_share=settings.max_share)
        metrics.begin(self.shadow)
        self._live = _Live(self._registry)
        self._feed = ShadowFeed(self.shadow)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._write()  # what cannot be written is said now
        self._thread = threading.Thread(target=self._work, name="aioserve-shadow", daemon=True)
        self._thread.start()

    # What is told.

    def on_added(self, request: Request, now: float) -> None:
        with self._lock:
            self._live.added(request)
            self._feed.on_added(request, now)

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        with self._lock:
            self._feed.on_planned(output, now)

    def on_back(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        with self._lock:
            self._live.returned(result, now)
            self._feed.on_back(output, result, now)

    def on_ended(self, request_ids: list[str], reason: FinishReason, now: float) -> None:
        with self._lock:
            self._live.ended(request_ids, now)
            self._feed.on_ended(request_ids, reason, now)

    def close(self) -> None:
        """End the thread; the file says what was known then."""
        self._is_closed.set()
        self._thread.join()

    # Its own thread.

    def _work(self) -> None:
        write_at = 0.0
        while not self._is_closed.wait(TICK_SECONDS):
            now = self._clock()
            with self._lock:
                if self.shadow.has_work:
                    self.shadow.advance(now)
            if now >= write_at:
                write_at = now + WRITE_SECONDS
                self._try_to_write()
        self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self._write()
        except (ConfigError, OSError) as error:
            logger.warning("%s", error)

    def _write(self) -> None:
        try:
            with self._lock:
                write_to_textfile(str(self._path), self._registry)
        except OSError as error:
            raise ConfigError(f"the shadow's metrics go to {self._path}: {error}") from error


def read_shadow(stated: Mapping[str, Any]) -> ShadowSettings | None:
    """Return what is stated under `shadow`; None if nothing is. Raises `ConfigError` for what is
    wrong with it.
    """
    if (given := stated.get("shadow")) is None:
        return None
    settings = convert(given, ShadowSettings, "--additional-config aioserve.shadow")
    if not 0.0 < settings.max_share <= 1.0:
        raise ConfigError(
            f"aioserve.shadow.max_share must be above 0 and at most 1, got {settings.max_share}"
        )
    return settings


class _Live(Collector):
    """Measures of the policy that decides, taken where the shadow's are: at the end of a step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histograms = {
            "time_to_first_token": Histogram(),
            "inter_token_latency": Histogram(),
            "request_latency": Histogram(),
        }
        self._arrivals: dict[str, float] = {}
        self._last: dict[str, float] = {}
        registry.register(self)

    def added(self, request: Request) -> None:
        self._arrivals[request.request_id] = request.arrival_time

    def returned(self, result: ModelRunnerOutput, now: float) -> None:
        """Each token that came is a first one, or one behind another."""
        for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            if not token_ids or request_id not in self._arrivals:
                continue
            last = self._last.get(request_id)
            if last is None:
                first = now - self._arrivals[request_id]
                self._histograms["time_to_first_token"].observe(first)
            else:
                self._histograms["inter_token_latency"].observe(now - last)
            self._last[request_id] = now

    def ended(self, request_ids: list[str], now: float) -> None:
        for request_id in request_ids:
            arrival, last = self._arrivals.pop(request_id, None), self._last.pop(request_id, None)
            if arrival is not None and last is not None:
                self._histograms["request_latency"].observe(now - arrival)

    def collect(self) -> Iterator[Metric]:
        """Called when the file is written."""
        for name, histogram in self._histograms.items():
            yield histogram.family(f"aioserve_{name}_seconds", "Under the policy that decides")
