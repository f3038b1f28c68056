"""The adapters that can be asked for by name: which are in memory, and who uses them.

The least recently used goes when another needs its place, but none that a request has. Knows names,
paths and counts; knows nothing about weights, tokens or HTTP.
"""

import asyncio
import itertools
import logging
from pathlib import Path

from aioserve.config import EngineConfig
from aioserve.engine.adapter_metrics import AdapterMetrics
from aioserve.engine.samples import Samples
from aioserve.errors import (
    ConfigError,
    RequestFailedError,
    RequestTimeoutError,
    UnknownModelError,
)
from aioserve.model_source.adapter import read_adapter
from aioserve.runner.interface import RunnerInterface

logger = logging.getLogger(__name__)


class _Adapter:
    """One name, until it is unloaded and its last request has ended."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = Path(path).expanduser().absolute()
        self.adapter_id = ""  # its name and its weights' digest; known once it was read
        self.num_users = 0
        self.last_used = 0  # a number that rises with every use of any

    def __repr__(self) -> str:
        return f"adapter {self.name!r} ({self.path})"


class Adapters:
    """Used from one event loop; reads and lays out on other threads while steps go on."""

    def __init__(
        self, config: EngineConfig, runner: RunnerInterface, metrics: AdapterMetrics
    ) -> None:
        """`load_configured` loads those of the settings."""
        self._metrics = metrics
        self._config = config
        self._runner = runner
        self._named: dict[str, _Adapter] = {}
        self._resident: set[_Adapter] = set()
        self._arriving: set[str] = set()  # names that are being loaded for the first time
        self._door = asyncio.Lock()  # one after another comes into memory, in order
        self._leaving: _Adapter | None = None  # gets no new users: somebody waits for its place
        self._freed = asyncio.Event()
        self._uses = itertools.count(1)

    @property
    def paths(self) -> dict[str, Path]:
        """By name, in the order in which they were loaded."""
        return {name: adapter.path for name, adapter in self._named.items()}

    async def load_configured(self) -> None:
        """Those of the settings. Raises `ConfigError`."""
        for spec in self._config.adapters.lora:
            name, is_pair, path = spec.partition("=")
            if not (is_pair and name and path):
                raise ConfigError(f"adapters.lora must be NAME=PATH, got {spec!r}")
            await self.load(name, path)

    async def load(self, name: str, path: str) -> None:
        """Give an adapter a name. Raises `ConfigError` for a name that is in use, and for files
        that are no adapter of this model.
        """
        if not name.isprintable() or not name.strip() or not path:
            raise ConfigError(f"an adapter needs a name and a path, got {name!r} and {path!r}")
        if name == self._config.model.served_name:
            raise ConfigError(f"adapter name {name!r} is the model's own")
        if name in self._named or name in self._arriving:
            raise ConfigError(f"adapter name {name!r} is in use: unload it first")
        adapter = _Adapter(name, path)
        self._arriving.add(name)
        try:
            async with self._door:
                self._make_room()
                await self._read(adapter)
                self._named[name] = adapter
                if len(self._resident) > self._config.adapters.max_cpu_loras:
                    self._evict(adapter)  # all others are in use; it was checked
        finally:
            self._arriving.remove(name)
        logger.info("loaded %r", adapter)

    def unload(self, name: str) -> None:
        """Forget a name: requests that have it finish. Raises `UnknownModelError`."""
        adapter = self._known(name)
        del self._named[name]
        if not adapter.num_users:
            self._evict(adapter)
        logger.info("unloaded %r; %d requests go on with it", adapter, adapter.num_users)

    def check_name(self, name: str) -> None:
        """Raises `UnknownModelError` if it is neither the model's nor an adapter's."""
        if name != self._config.model.served_name:
            self._known(name)

    async def hold(self, samples: Samples, name: str, seconds: float | None) -> None:
        """Have the adapter of that name in memory until the `samples` have ended, which are told
        its id. Waits for a place, and for the files, if need be. Nothing to do for the model's own.

        Raises `UnknownModelError`, `RequestTimeoutError` after so many seconds, and
        `RequestFailedError` if its files cannot be read any more.
        """
        if name == self._config.model.served_name:
            return
        try:
            async with asyncio.timeout(seconds):
                adapter = await self._bring(name)
        except TimeoutError:
            raise RequestTimeoutError(
                f"adapter {name!r} did not come into memory in {seconds:g} s"
            ) from None
        adapter.last_used = next(self._uses)
        adapter.num_users += 1
        self._metrics.requests[name] += 1
        samples.adapter_id = adapter.adapter_id

        def let_go() -> None:
            samples.let_go = None
            self._let_go(adapter)

        samples.let_go = let_go

    async def _bring(self, name: str) -> _Adapter:
        adapter = self._known(name)
        if adapter in self._resident and adapter is not self._leaving:
            return adapter
        async with self._door:
            adapter = self._known(name)
            try:
                while not self._make_room(but=adapter):
                    self._leaving = self._least_recent(but=adapter)
                    self._freed.clear()
                    await self._freed.wait()
            finally:
                self._leaving = None
            if adapter not in self._resident:
                try:
                    await self._read(adapter)
                except ConfigError as error:
                    raise RequestFailedError(f"cannot load {adapter!r} again: {error}") from error
            if self._named.get(name) is not adapter:
                self._evict(adapter)
                self._known(name)  # there may be another by now: this request is not for it
                raise UnknownModelError(f"model {name!r} was replaced meanwhile", param="model")
            return adapter

    async def _read(self, adapter: _Adapter) -> None:
        """Into memory, and into the runner's."""
        max_rank = self._config.adapters.max_lora_rank
        files = await asyncio.to_thread(read_adapter, adapter.path, max_rank)
        adapter.adapter_id = adapter_id = f"{adapter.name}@{files.digest}"
        self._resident.add(adapter)
        self._metrics.num_resident = len(self._resident)
        try:
            await self._runner.load_adapter(adapter_id, files)
        except BaseException:
            self._evict(adapter)
            raise
        self._metrics.num_loads += 1

    def _make_room(self, but: _Adapter | None = None) -> bool:
        """For one more; whether there is some, or `but` has its place already."""
        if but in self._resident:
            return True
        while len(self._resident) >= self._config.adapters.max_cpu_loras:
            victim = self._least_recent(but)
            if victim is None or victim.num_users:
                return False
            self._evict(victim)
            self._metrics.num_evictions += 1
        return True

    def _least_recent(self, but: _Adapter | None) -> _Adapter | None:
        """Of those in memory; before all others, those that nobody uses."""
        others = (adapter for adapter in self._resident if adapter is not but)
        return min(others, key=lambda a: (a.num_users > 0, a.last_used), default=None)

    def _let_go(self, adapter: _Adapter) -> None:
        adapter.num_users -= 1
        if not adapter.num_users:
            if self._named.get(adapter.name) is not adapter:
                self._evict(adapter)
            self._freed.set()

    def _evict(self, adapter: _Adapter) -> None:
        if adapter in self._resident:
            self._resident.remove(adapter)
            self._metrics.num_resident = len(self._resident)
            # The same files may have been given the same name again meanwhile.
            if all(other.adapter_id != adapter.adapter_id for other in self._resident):
                self._runner.unload_adapter(adapter.adapter_id)

    def _known(self, name: str) -> _Adapter:
        adapter = self._named.get(name)
        if adapter is None:
            known = ", ".join(map(repr, (self._config.model.served_name, *self._named)))
            raise UnknownModelError(
                f"model {name!r} does not exist; this server has {known}", param="model"
            )
        return adapter
