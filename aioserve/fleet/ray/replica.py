"""A replica of Ray Serve: one `AsyncEngine`, with any policy, and what it says of itself.

Routers are told by the statistics of its scheduler; dashboards find them among Ray's own metrics.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.util.metrics import Gauge

from aioserve.config import EngineConfig, Section
from aioserve.engine import AsyncEngine, Prompt
from aioserve.engine.watchdog import LOG_SECONDS, log_within
from aioserve.errors import ConfigError, EngineDeadError
from aioserve.fleet.ray.fleet import TICKET
from aioserve.fleet.ray.kv_feed import KVFeed, model_of
from aioserve.fleet.ray.line import Door
from aioserve.fleet.ray.serve_log import log_through_serve
from aioserve.fleet.routing import ReplicaReport, StepTimes
from aioserve.outputs import RequestOutput, SchedulerStats
from aioserve.params import PoolingParams, SamplingParams
from aioserve.runner.interface import RunnerInfo
from aioserve.server.app import exempt_from_garbage_collection
from aioserve.support import __version__
from aioserve.support.arguments import EXIT_ENGINE_DEAD

KEPT = 0.5  # weight of the mean of step times beside the newest interval of steps


class Reporter:
    """A maker of the reports of one replica."""

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
        """Return the state now; None before the engine has started and after its end."""
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
            num_leased_kv_tokens=stats.num_leased_kv_blocks * self._block_size,
        )

    def _learn(self, stats: SchedulerStats) -> None:
        """Learn what a step took between two reports in which requests ran."""
        last, now = self._last, self._clock()
        self._last = (now, stats.num_steps) if stats.num_running_reqs else None
        if last is None or self._last is None or stats.num_steps <= last[1]:
            return
        seconds = (now - last[0]) / (stats.num_steps - last[1])
        self._step_times.learn(stats.num_running_reqs, seconds, stats.num_steps - last[1])
        kept = KEPT if self._step_seconds else 0.0
        self._step_seconds = kept * self._step_seconds + (1 - kept) * seconds


# A replica's state among Ray's own metrics, where its dashboards and Prometheus find it. Ray adds
# the replica and the deployment as labels. What a front end counts is not here.


OF_POLICY = ("policy", "policy_gauges")  # fields that are told by a gauge of their own
REPORT_SECONDS = 5.0  # Ray collects what there is every ten


class StatsGauges:
    """A gauge per number of `SchedulerStats`, for the two shares that follow from them, and one
    for what the policy shows of itself.
    """

    def __init__(self, get_stats: Callable[[], SchedulerStats | None]) -> None:
        self._get_stats = get_stats
        fields = [name for name in SchedulerStats.__struct_fields__ if name not in OF_POLICY]
        names = (*fields, "kv_cache_usage", "prefix_hit_rate")
        self._gauges = {name: Gauge(f"aioserve_{name}") for name in names}
        self._of_policy = Gauge("aioserve_policy_gauge", tag_keys=("policy", "gauge"))
        self._shown: set[tuple[str, str]] = set()  # by policy and gauge

    def report(self) -> None:
        """Set the gauges to the engine's stats of now."""
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
        shown = {(stats.policy, name): value for name, value in stats.policy_gauges.items()}
        for policy, name in self._shown - shown.keys():  # of a policy that has gone
            self._of_policy.set(math.nan, {"policy": policy, "gauge": name})
        for (policy, name), value in shown.items():
            self._of_policy.set(value, {"policy": policy, "gauge": name})
        self._shown = set(shown)

    async def keep_reporting(self) -> None:
        """Report the stats at regular intervals until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_SECONDS)


# A replica of Ray Serve: one `AsyncEngine`, with any policy. Knows what Ray asks of a replica, and
# answers it from the engine. Knows no HTTP, and no router but that there may be some that follow
# its KV cache.


logger = logging.getLogger(__name__)


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a front end must know of the engines behind it."""

    version: str
    config: EngineConfig  # what it was started with
    max_model_len: int
    adapters: dict[str, Path]
    adapter_ids: dict[str, str]  # by name, of those in memory
    runner_info: RunnerInfo
    started_at: int  # of this one; of the others about then


class UserConfig(Section, frozen=True, kw_only=True):
    """The settings that may change while a replica runs."""

    policy: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)


def _end_process(why: str) -> None:
    """On a thread of its own: the loop stands still."""
    log_within(LOG_SECONDS, logger.critical, "%s: the replica ends now", why)
    os._exit(EXIT_ENGINE_DEAD)


class EngineReplica:
    """The replica of which a deployment is made. Methods are called on the replica's loop."""

    async def __init__(self, config: EngineConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        """Raises what `AsyncEngine.start` does: Ray tells it and tries again."""
        log_through_serve()
        self._config = config
        reporter = Reporter(
            config,
            lambda: self._engine.get_stats(),
            time.monotonic,
            lambda: self._engine.adapters.ids,
        )
        host = ray.util.get_node_ip_address()
        self._feed = KVFeed(host, reporter.make, lambda: self._door.open(), model=model_of(config))
        self._engine = AsyncEngine(config, on_kv_event=self._feed.note)
        try:
            await self._engine.start()
        except BaseException:
            await self._feed.close()
            raise
        if config.server.exit_on_dead_engine:
            self._engine.internals.end_process_with_loop(_end_process)  # Ray starts another
        self._door = Door(self._engine, host)
        self._feed.start()
        gauges = StatsGauges(self._engine.get_stats)
        self._reporting = asyncio.create_task(gauges.keep_reporting())
        exempt_from_garbage_collection()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the stream of `AsyncEngine.add_request`. Cancelling the call aborts the request."""
        async with await self._engine.add_request(prompt, params, **options) as stream:
            async for output in stream:
                yield output

    async def hold(self, prompt: list[int]) -> AsyncIterator[tuple[str, str]]:
        """Yield a place in Ray's books for a request that comes by a line: this replica's name and
        ticket, then nothing until the call is cancelled. `prompt` was for the router.
        """
        yield serve.get_replica_context().replica_id.unique_id, self._feed.ticket.encode()
        await asyncio.Event().wait()

    async def describe(self) -> ReplicaInfo:
        """Return the facts about the replica that do not change while it lives."""
        engine = self._engine
        return ReplicaInfo(
            version=__version__,
            config=self._config,
            max_model_len=engine.max_model_len,
            adapters=engine.adapters.paths,
            adapter_ids=engine.adapters.ids,
            runner_info=engine.internals.runner_info,
            started_at=engine.started_at,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """`user_config` of the deployment, when it is set or changes. Raises `ConfigError`."""
        try:
            wanted = msgspec.convert(user_config, UserConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"user_config: {error}") from None
        self._engine.switch_policy(wanted.policy, wanted.options)

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine has died: then Ray replaces this replica."""
        if self._engine.errored is not None:
            raise EngineDeadError(f"the engine has died: {self._engine.errored}")

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the ticket of the feed of KV events, which Ray hands to each router."""
        return {TICKET: self._feed.ticket.encode()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the queue and KV cache usage that `autoscaling.TokensQueued` scales by."""
        stats = self._engine.get_stats()
        if stats is None:
            return {}
        return {
            "queued_prompt_tokens": stats.num_waiting_tokens,
            "kv_cache_usage": stats.kv_cache_usage,
            "num_requests": stats.num_running_reqs + stats.num_waiting_reqs,
        }

    async def __del__(self) -> None:
        """Ray waits for its requests, as long as `graceful_shutdown_timeout_s` says."""
        if hasattr(self, "_reporting"):  # else it never started
            if self._engine.errored is None:
                await self._door.leave()
            self._reporting.cancel()
            self._door.close()
            await self._engine.shutdown()
            await self._feed.close()
