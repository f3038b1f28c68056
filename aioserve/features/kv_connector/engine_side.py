"""Makes the KV connector that the settings ask for, and shows Prometheus what it does.

Knows settings and constructors. Knows no request and no block.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioserve.config import CacheConfig, EngineConfig
from aioserve.engine.core import OutputSink
from aioserve.engine.stream import SampleState
from aioserve.errors import ConfigError
from aioserve.features.kv_connector import (
    BlockDirectory,
    BlockStore,
    HostMemoryWorker,
    OffloadingConnector,
    fingerprint,
)
from aioserve.kv_cache import KVConnectorBase
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import EngineCoreOutput
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler import BaseScheduler, SchedulerInterface
from aioserve.support import __version__

GIB = 1 << 30

# No end is held back for longer: on a disk that hangs, nothing will be found. A guess.
HOLD_SECONDS = 10.0


def check_connector(config: EngineConfig, policy: type[SchedulerInterface]) -> None:
    """Raises `ConfigError` for what a connector cannot go along with, before anything is loaded."""
    kind = config.cache.kv_connector
    if kind == "none":
        return
    if not issubclass(policy, BaseScheduler):
        raise ConfigError(
            f"cache.kv_connector is {kind}, but policy {policy.__name__} does not derive from "
            "BaseScheduler, whose verbs load blocks"
        )
    if config.scheduler.decision_log is not None:
        raise ConfigError(
            f"cache.kv_connector is {kind}, and what it finds is not in a decision log: such a log "
            "could not be replayed; give one of both"
        )
    is_real = config.runner.runner == "model"  # a simulated directory is nowhere
    if kind == "disk" and is_real and config.cache.kv_connector_path is None:
        raise ConfigError("cache.kv_connector is disk, but there is no cache.kv_connector_path")
    if kind == "memory" and config.cache.kv_role != "both":
        raise ConfigError(
            f"cache.kv_role is {config.cache.kv_role}, but no other engine sees what kv_connector "
            "memory keeps: give disk, or leave the role out"
        )


def make_connector(
    config: EngineConfig,
    model_info: ModelInfo,
    runner: RunnerInterface,
    metrics: "KVConnectorMetrics",
) -> KVConnectorBase | None:
    """Return the connector for a loaded runner, on its event loop; None if there is to be
    none. Raises `ConfigError`.
    """
    cache = config.cache
    if cache.kv_connector == "none":
        return None
    from aioserve.runner.simulated import SimulatedRunner

    worker = runner.make_kv_worker(int(cache.kv_connector_gib * GIB))
    store: BlockStore | None = None
    if isinstance(runner, SimulatedRunner):
        if cache.kv_connector == "disk":
            store = runner.make_kv_store(int(cache.kv_connector_disk_gib * GIB))
    elif cache.kv_connector == "disk":
        assert cache.kv_connector_path is not None, "check_connector"
        if not isinstance(worker, HostMemoryWorker):
            raise ConfigError(
                "cache.kv_connector is disk, but this engine's runner has no bytes that files "
                "could hold: give memory, or leave it out"
            )
        store = BlockDirectory(
            Path(cache.kv_connector_path),
            _identity(config, model_info, worker),
            worker.block_bytes,
            worker.memory,
            max_bytes=int(cache.kv_connector_disk_gib * GIB),
            identify=partial(_identity_of, config, worker),
        )
    connector = OffloadingConnector(worker, cache.block_size, store=store, role=cache.kv_role)
    metrics.connector = connector
    return connector


def _identity_of(config: EngineConfig, worker: HostMemoryWorker, path: str) -> dict[str, str]:
    """The identity of blocks once the weights are those of the model at `path`."""
    model = msgspec.structs.replace(config.model, model=path)
    config = msgspec.structs.replace(config, model=model)
    return _identity(config, ModelInfo(model), worker)


def _identity(
    config: EngineConfig, model_info: ModelInfo, worker: HostMemoryWorker
) -> dict[str, str]:
    """Return all that the bytes of a block depend on, besides tokens, salt and adapter: those are
    in its hash. What computes with other kernels or versions rounds differently: it is another
    engine.
    """
    from aioserve.runner.models.long_rope import has_long_factors

    model = config.model
    is_long = has_long_factors(model_info.hf_config, model_info.max_model_len)
    return {
        "aioserve": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "model": fingerprint(model_info.source.path) + ", of long factors" * is_long,
        "drafts": _draft_identity(config),
        "weights": f"{model.dtype}, {model.quantization} by {model.quantization_group_size}, "
        f"fused {model.fused}, activations {model.activations}",
        "block size": str(config.cache.block_size),
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "layout": worker.layout,
        "byte order": sys.byteorder,
    }


def _draft_identity(config: EngineConfig) -> str:
    """Return what makes drafts, if a model does: what it knows of a block is kept with the
    block.
    """
    speculation = config.speculation
    if not speculation.drafts_by_model or (name := speculation.draft_model) is None:
        return speculation.speculative_method if speculation.drafts_by_model else "none"
    settings = msgspec.structs.replace(config.model, model=name, revision=None, max_model_len=None)
    draft = ModelInfo(settings)
    return f"{speculation.speculative_method} {fingerprint(draft.source.path)}"


class HeldBack:
    """Delivery for an engine that hands its blocks to others: the end of a request is told when
    they can be found, so that the client can then send the request on; or after `HOLD_SECONDS`.
    A producer holds all ends back, other engines those of requests that are handed over.
    """

    def __init__(
        self,
        sink: OutputSink,
        connector: KVConnectorBase,
        reader_of: Callable[[str], SampleState | None],
        config: CacheConfig,
    ) -> None:
        """`reader_of` returns what reads the outputs of the request of that id now."""
        self._sink = sink
        self.expire, self.fail = sink.expire, sink.fail
        self._connector = connector
        self._reader_of = reader_of
        self._holds_all = config.kv_role == "producer"

    def deliver(self, client_index: int, outputs: list[EngineCoreOutput]) -> list[str]:
        """Hand a step's outputs on, but for the ends of requests that are held back."""
        ends = [output for output in outputs if output.finish_reason is not None]
        held: dict[str, EngineCoreOutput] = {}
        early: list[EngineCoreOutput] = []  # tokens for whose reader an end behind them is enough
        for end in ends:
            reader = self._reader_of(end.request_id)
            if reader is not None and reader.hands_over and end.new_token_ids:
                early.append(msgspec.structs.replace(end, finish_reason=None, stop_reason=None))
                held[end.request_id] = EngineCoreOutput(
                    end.request_id, [], end.finish_reason, end.stop_reason
                )
            elif self._holds_all or (reader is not None and reader.hands_over):
                held[end.request_id] = end
        if held:  # their readers may have left by then: no reader is told
            self._hold(client_index, list(held.values()))
            outputs = [output for output in outputs if output.request_id not in held] + early
        return self._sink.deliver(client_index, outputs)

    def _hold(self, client_index: int, ends: list[EngineCoreOutput]) -> None:
        readers = [self._reader_of(end.request_id) for end in ends]

        def tell() -> None:
            if ends:
                timer.cancel()
                # An id whose reader has left may be another request's by now.
                told = [
                    end
                    for end, reader in zip(ends, readers, strict=True)
                    if reader is not None and self._reader_of(end.request_id) is reader
                ]
                ends.clear()
                self._sink.deliver(client_index, told)

        timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, tell)
        self._connector.when_saved(tell)


class KVConnectorMetrics(Collector):
    """The metrics of a connector since the start. Nothing is told without one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connector: KVConnectorBase | None = None  # set once it is made
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for every scrape."""
        if self.connector is None:
            return
        stats = self.connector.make_stats()
        for name, documentation, value in (
            (
                "queried_tokens",
                "Tokens that the prefix cache lacked when requests were admitted",
                stats.num_queried_tokens,
            ),
            ("hit_tokens", "Prompt tokens loaded from host memory", stats.num_hit_tokens),
            ("saved_tokens", "Tokens copied to host memory", stats.num_saved_tokens),
            (
                "unsaved_tokens",
                "Tokens for which host memory had no room",
                stats.num_unsaved_tokens,
            ),
            ("fetched_tokens", "Tokens read from the directory", stats.num_fetched_tokens),
            (
                "passed_tokens",
                "Tokens that are held, and that were cheaper to compute",
                stats.num_passed_tokens,
            ),
            ("failures", "Blocks that could not be read or written", stats.num_failures),
            (
                "loaded_bytes",
                "Bytes copied from host memory to the KV cache",
                stats.num_bytes_loaded,
            ),
            ("saved_bytes", "Bytes copied from the KV cache to host memory", stats.num_bytes_saved),
            ("read_bytes", "Bytes read from the directory", stats.num_bytes_read),
            ("written_bytes", "Bytes written to the directory", stats.num_bytes_written),
            ("load_seconds", "Seconds that steps took to load blocks", stats.load_seconds),
            ("read_seconds", "Seconds that reads from the directory took", stats.read_seconds),
        ):
            yield CounterMetricFamily(f"aioserve_kv_connector_{name}", documentation, value)
        yield GaugeMetricFamily(
            "aioserve_kv_connector_host_blocks", "Blocks in host memory", stats.num_host_blocks
        )
        yield GaugeMetricFamily(
            "aioserve_kv_connector_kept_blocks",
            "Blocks in host memory kept for requests that a policy has offloaded",
            stats.num_kept_blocks,
        )
        yield GaugeMetricFamily(
            "aioserve_kv_connector_host_slots",
            "Blocks for which host memory has room",
            stats.num_host_slots,
        )
