"""Builds an engine from its settings: runner, KV cache, scheduler, observers, processors.

Knows every constructor, and in which order the parts need each other. Knows no request and no task;
the caller owns the parts. Last, the KV cache, which the simulator and what-if on a decision log
make here as well.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from aioserve.engine.admission import Admission
from aioserve.engine.clock import Clock, LoopLag, clock_of, is_real
from aioserve.engine.core import EngineCore, EngineLoop, OutputSink
from aioserve.engine.input_processor import InputProcessor, PoolingValidator
from aioserve.engine.metrics import EngineMetrics
from aioserve.engine.output_processor import OutputProcessor, OutputRouter
from aioserve.engine.step_loop import StepLoop
from aioserve.engine.stream import Claims
from aioserve.errors import ConfigError
from aioserve.kv_cache import KVCacheManager, KVEvent, WindowSpec, make_resources
from aioserve.model_source.info import ModelInfo
from aioserve.request import ENTROPY, check_names, find_function
from aioserve.runner.interface import RUNNERS, RunnerInfo, RunnerInterface
from aioserve.scheduler import FALLBACK_POLICY, BaseScheduler, SchedulerInterface, load_policy
from aioserve.scheduler.blame import blamed
from aioserve.support.parts import load

if TYPE_CHECKING:
    from aioserve.engine.adapters import Adapters
    from aioserve.engine.kv_events import KVEventRelay
    from aioserve.engine.request_log import RequestLog
    from aioserve.engine.tracing import Tracing
    from aioserve.kv_cache import KVConnectorBase


logger = logging.getLogger(__name__)


class ShadowTurns(Protocol):
    """The turns that a shadow gets beside live steps."""

    def close(self) -> None:
        """Stop the shadow: it follows no further step."""


class Shadows(Protocol):
    """A maker of shadows: makes the one that settings ask for, and has it follow the live step
    loop.
    """

    def follow(
        self,
        loop: StepLoop[Any],
        config: EngineConfig,
        info: RunnerInfo,
        max_model_len: int,
        before: ShadowTurns | None = None,
    ) -> ShadowTurns | None:
        """Have the shadow of `config`, or none, observe `loop` in the place of `before`. Raises
        `ConfigError` or `PolicyError` before anything has changed.
        """


class EngineParts(NamedTuple):
    """The parts of an engine that serves, besides its runner."""

    runner_info: RunnerInfo
    core: EngineCore
    input_processor: InputProcessor
    pooling: PoolingValidator
    output_processor: OutputProcessor
    clock: Clock
    max_model_len: int  # the setting, or what the KV pool can hold
    kv_events: "KVEventRelay | None"
    shadow_turns: ShadowTurns | None
    request_log: "RequestLog | None"
    arrivals: Admission
    delivery: OutputRouter
    tracing: "Tracing | None"
    claims: Claims  # on request ids, by readers in this process or in workers

    async def close(self) -> None:
        """Give back all but the runner. The engine task has ended."""
        scheduler = self.core.loop.scheduler
        try:
            if (connector := scheduler.get_kv_connector()) is not None:
                await connector.shutdown()
        finally:
            scheduler.shutdown()
            self.input_processor.close()
            if self.request_log is not None:
                self.request_log.close()
            if self.tracing is not None:
                await self.tracing.close()


class EngineBuilder:
    """A builder that refuses what cannot work before weights are loaded. Then load `runner`, and
    `build` the rest.

    Of what is built, `config` is what the settings amount to with that runner.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_info: ModelInfo,
        runner: RunnerInterface | None,
        metrics: EngineMetrics,
    ) -> None:
        """`runner` replaces the one that the settings name. Begins the request log. To be called on
        the loop that the engine will live in. Raises `ConfigError` for what cannot work.
        """
        self.config, self._metrics = config, metrics
        self._model_info = model_info
        self._clock = clock_of(asyncio.get_running_loop())
        self._policy = load_policy(config.scheduler.policy)
        if issubclass(self._policy, BaseScheduler):
            self._policy.parse_options(config.scheduler.options)
            self._policy.check_limits(config.scheduler, model_info.max_model_len)
        if config.shadow.shadow_policy is not None:
            self.shadows  # noqa: B018 - which refuses one that cannot work
        _check_logs(config.scheduler)
        if config.cache.kv_connector != "none":
            load("engine", "KV connector check")(config, self._policy)
        _check_chat_template(model_info)
        if config.server.otlp_traces_endpoint is not None:
            from aioserve.engine.tracing import check_installed

            check_installed()
        if runner is None:
            config.check_effects()
            runner = make_runner(config, model_info)
        self.runner = runner
        most = config.adapters.max_cpu_loras
        metrics.adapters.get_places = lambda: ([], [], most)  # until there are `adapters`
        self._refuses_adapters = False
        self._connector: KVConnectorBase | None = None
        self._request_log: RequestLog | None = None
        if config.scheduler.request_log is not None:
            from aioserve.engine import request_log

            self._request_log = request_log.RequestLog(config.scheduler.request_log, self._clock())

    @cached_property
    def shadows(self) -> Shadows:
        """Makes shadows; loaded when the first one is wanted. Raises `ConfigError` for a shadow
        policy that cannot work.
        """
        make = load("engine", "shadows")
        made: Shadows = make(self.config, self._model_info, self._clock, self._metrics.shadow)
        return made

    @cached_property
    def adapters(self) -> "Adapters":
        """The LoRA adapters of the engine; loaded when the first one is asked for."""
        from aioserve.engine.adapters import Adapters

        adapters = Adapters(self.config, self.runner, self._metrics.adapters)
        if self._refuses_adapters:
            adapters.refuse()
        return adapters

    async def close_adapters(self) -> None:
        """End all waits for adapters; returns when no file is being read."""
        self._refuses_adapters = True
        if "adapters" in self.__dict__:
            await self.adapters.close()

    async def close(self) -> None:
        """Nothing will be built, or that has failed: give back what there is."""
        if self._request_log is not None:
            self._request_log.close()
        if self._connector is not None:
            await self._connector.shutdown()
        await self.close_adapters()
        await self.runner.close()

    def build(self, info: RunnerInfo, on_kv_event: Callable[[KVEvent], None] | None) -> EngineParts:
        """Return the parts around the runner, which is loaded and has told this `info`. Raises
        `ConfigError` or `PolicyError`.
        """
        check_asked(self._policy, info)
        self.config = config = with_runner(self.config, info)
        clock, metrics = self._clock, self._metrics
        if config.cache.kv_connector != "none":
            make_connector = load("engine", "KV connector")
            self._connector = make_connector(
                config, self._model_info, self.runner, metrics.kv_connector
            )
        kv_cache = make_kv_cache(
            config.cache, info, record_events=on_kv_event is not None, connector=self._connector
        )
        max_model_len = self._fit_max_model_len(kv_cache.num_slots)
        _check_windows(config, info.windows, max_model_len)
        scheduler = self._make_scheduler(kv_cache, max_model_len)
        loop: EngineLoop = StepLoop(
            scheduler,
            depth=config.scheduler.depth,
            clock=clock,
            stall_timeout=config.scheduler.stall_timeout,
            fallback=config.scheduler.under(FALLBACK_POLICY),
        )
        turns = None
        if config.shadow.shadow_policy is not None:
            turns = self.shadows.follow(loop, config, info, max_model_len)
        thread = None
        if config.runner.runner != "simulated":  # which takes none of a CPU's runner
            from aioserve.runner.cpu.runner import OneThread

            thread = OneThread("aioserve-template")
        input_processor = InputProcessor(
            self._model_info,
            max_model_len,
            config.runner.seed,
            self.runner.grammars,
            runner_info=info,
            template_thread=thread,
        )
        pooling = PoolingValidator(self._model_info, info)
        tokenizer = None if config.model.skip_tokenizer_init else self._model_info.tokenizer
        tracing = None
        if config.server.otlp_traces_endpoint is not None:
            from aioserve.engine.tracing import Timelines, Tracing, make_exporter

            exporter = make_exporter(config.server.otlp_traces_endpoint)
            timelines = Timelines()
            loop.observers.subscribe(timelines)
            tracing = Tracing(exporter, timelines, clock, config.model.served_name)
        output_processor = OutputProcessor(
            tokenizer, metrics, self._request_log, tracing, clock=clock
        )
        loop.observers.subscribe(output_processor)
        relay = None
        if on_kv_event is not None:
            from aioserve.engine.kv_events import KVEventRelay

            relay = KVEventRelay(
                kv_cache, on_kv_event, lambda error: loop.log.log("on_kv_event", error)
            )
            loop.observers.subscribe(relay)
        delivery = OutputRouter(output_processor, clock)
        sink: OutputSink = delivery
        if kv_cache.connector is not None and config.cache.kv_connector == "disk":
            # The ends of requests are told when other engines can find their blocks.
            hold_back = load("engine", "held ends")
            sink = hold_back(delivery, kv_cache.connector, output_processor.reader_of, config.cache)
        core = EngineCore(loop, self.runner, sink, clock=clock)
        arrivals = Admission(input_processor, lambda: self.adapters, core, metrics, clock, config)
        output_processor.left_queue = arrivals.left_queue
        return EngineParts(
            info,
            core,
            input_processor,
            pooling,
            output_processor,
            clock,
            max_model_len,
            relay,
            turns,
            self._request_log,
            arrivals,
            delivery,
            tracing,
            output_processor.claims,
        )

    def _make_scheduler(self, kv_cache: KVCacheManager, max_model_len: int) -> SchedulerInterface:
        """Return the live one; recorded, if a log is wanted."""
        settings, clock = self.config.scheduler, self._clock
        # A policy that implements the interface without BaseScheduler is built the same way.
        make_policy: Callable[..., SchedulerInterface] = self._policy
        with blamed(self._policy, "__init__()"):
            if settings.decision_log is None:
                return make_policy(settings, kv_cache, max_model_len=max_model_len, clock=clock)
            recorded: Callable[..., SchedulerInterface] = load("engine", "decision log")
            return recorded(
                make_policy,
                settings,
                kv_cache,
                max_model_len=max_model_len,
                clock=clock,
                # On a virtual clock no loop is late, and a timer more could move the others.
                loop_lag=LoopLag() if is_real(clock) else None,
            )

    def _fit_max_model_len(self, num_slots: int) -> int:
        """Return what `fit_max_model_len` does, and log that a model was cut short."""
        wanted = self._model_info.max_model_len
        fitting = fit_max_model_len(self.config.model, wanted, num_slots)
        if fitting < wanted:
            logger.warning(
                "the KV cache holds %d tokens: serving at most that many per request, not the "
                "model's %d (raise kv_cache_gib for more)",
                num_slots,
                wanted,
            )
        return fitting


def _check_logs(settings: SchedulerConfig) -> None:
    """Raises `ConfigError` for a log that cannot be written."""
    if settings.decision_log is None and settings.request_log is None:
        return
    from aioserve.support.files import check_writable

    check_writable(settings.decision_log, "decision log")
    check_writable(settings.request_log, "request log")


def with_runner(config: EngineConfig, info: RunnerInfo) -> EngineConfig:
    """Return the settings with those of the scheduler that depend on the runner, by its `info`."""
    scheduler, speculation = config.scheduler, config.speculation
    if scheduler.pipeline_depth is None:
        scheduler = msgspec.structs.replace(scheduler, pipeline_depth=info.pipeline_depth)
    if speculation.drafts_by_model:  # it writes K and V of what it guesses
        ahead = max(scheduler.num_lookahead_tokens, speculation.num_speculative_tokens)
        scheduler = msgspec.structs.replace(scheduler, num_lookahead_tokens=ahead)
    return msgspec.structs.replace(config, scheduler=scheduler)


def _check_windows(config: EngineConfig, spec: WindowSpec | None, max_model_len: int) -> None:
    """Every request that is accepted must be able to run alone in the pool of windows. Raises
    `ConfigError`.
    """
    if spec is not None:
        size = config.cache.block_size
        largest = spec.num_request_blocks(max_model_len - 1, max_model_len - 1, size)
        if largest > spec.num_blocks:
            raise ConfigError(
                f"a request needs up to {largest} blocks for layers with a sliding window, but "
                f"there are {spec.num_blocks}: raise num_window_blocks or kv_cache_gib, or lower "
                "long_prefill_token_threshold or max_num_batched_tokens"
            )


def check_policies(config: EngineConfig) -> None:
    """Raises `ConfigError` if the policy or its shadow is not to be found, or has no such options:
    what can be said of them without a model.
    """
    wanted = [config.scheduler]
    if config.shadow.shadow_policy is not None:
        wanted.append(load("engine", "shadow settings")(config))
    for each in wanted:
        policy = load_policy(each.policy)
        if issubclass(policy, BaseScheduler):
            policy.parse_options(each.options)


def _check_chat_template(model_info: ModelInfo) -> None:
    """Raises `ConfigError` if the chat template of the settings does not compile."""
    if (source := model_info.chat_template) is None:
        return
    if model_info.config.skip_tokenizer_init:
        raise ConfigError("chat_template has no effect: skip_tokenizer_init is set")
    from aioserve.engine.template_process import syntax_error

    if (what := syntax_error(source)) is not None:
        raise ConfigError(f"model.chat_template: {model_info.config.chat_template}, {what}")


def make_runner(config: EngineConfig, model_info: ModelInfo) -> RunnerInterface:
    """Return the runner that the config names; only that one is imported."""
    if config.runner.runner == "simulated":
        from aioserve.runner.simulated import SimulatedRunner

        return SimulatedRunner(config, model_info)
    from aioserve.runner.devices import choose_device

    if choose_device(config) == "cuda":
        speculation = config.speculation
        if speculation.drafts_surely and config.scheduler.pipeline_depth != 1:
            raise ConfigError(
                f"speculation.speculative_method is {speculation.speculative_method}, but on a "
                "CUDA device a step begins before the tokens are known from which drafts are "
                "made: give --pipeline-depth 1, or --device cpu"
            )
        is_shared = config.runner.tensor_parallel_size > 1
        return RUNNERS["cuda ranks" if is_shared else "cuda"](config, model_info)
    if config.runner.tensor_parallel_size > 1:
        return RUNNERS["cpu ranks"](config, model_info)
    from aioserve.runner.cpu.runner import SleepingRunner

    return SleepingRunner(config, model_info)


# Whether this engine's runner can do what a policy asks of it: asked before it plans.


def check_asked(policy: type[SchedulerInterface], info: RunnerInfo) -> None:
    """Raises `ConfigError` if the policy wants row values that are not to be had, or sets a clock
    that nothing can set.
    """
    if not issubclass(policy, BaseScheduler):
        return
    if policy.sets_frequency and not info.sets_frequency:
        raise ConfigError(
            f"policy {policy.__name__} sets the card's clock, which only a simulated card has: "
            "compare it (python -m aioserve compare), or serve with --runner simulated"
        )
    if not policy.wants_row_values:
        return
    names = check_names(policy.wants_row_values, policy.__name__)
    if not info.gives_row_values:
        raise ConfigError(
            f"policy {policy.__name__} wants row values ({', '.join(names)}), which this engine's "
            "runner does not compute; on a CPU it would (--device cpu)"
        )
    for name in names:
        if name != ENTROPY:
            find_function(name)


# The KV cache of an engine. Knows no request.


def make_kv_cache(
    cache: CacheConfig,
    info: RunnerInfo,
    *,
    record_events: bool = False,
    connector: "KVConnectorBase | None" = None,
) -> KVCacheManager:
    """Return the manager of the blocks, state slots and window blocks that a runner has told of."""
    return KVCacheManager(
        info.num_kv_blocks,
        cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        watermark=cache.watermark,
        record_events=record_events,
        connector=connector,
        resources=make_resources(
            info.num_state_slots,
            info.windows,
            cache.block_size,
            keeps_prefixes=cache.enable_prefix_caching,
        ),
        max_draft_tokens=info.max_draft_tokens,
    )


def fit_max_model_len(model: ModelConfig, max_model_len: int, num_slots: int) -> int:
    """Return the most tokens of a request, so that every request that is accepted can run alone in
    a cache of `num_slots` tokens. `max_model_len` is what the model and the settings allow. Raises
    `ConfigError` if the settings ask for more than the cache holds.
    """
    if max_model_len - 1 <= num_slots:  # the last token is never computed
        return max_model_len
    if model.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the KV cache holds {num_slots} tokens: "
            "lower max_model_len or raise kv_cache_gib (or num_kv_blocks)"
        )
    return num_slots
