"""LoRA adapters by name: which are in memory, how many requests use them, and their metrics.

The least recently used goes when another needs its place, but none that a request has. Knows
names, paths and counts; knows nothing about weights, tokens or HTTP.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aioserve.config import EngineConfig
from aioserve.engine.metrics import AdapterMetrics, Places
from aioserve.engine.stream import Samples
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    RequestFailedError,
    RequestTimeoutError,
    RunnerDeadError,
    UnknownModelError,
)
from aioserve.runner.interface import RunnerInterface
from aioserve.support.parts import load

logger = logging.getLogger(__name__)


class _Adapter:
    """One name, until it is unloaded and its last request has ended."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = Path(path).expanduser().absolute()
        self.is_bound = False  # to the weights of the model: it brings some of them
        self.adapter_id = ""  # its name and its weights' digest; known while it is in memory
        self.num_users = 0  # those that have it or wait for its reading, and that itself
        self.last_used = 0  # a number that rises with every use of any
        self.reading: asyncio.Task[None] | None = None  # goes on when the request has left

    def __repr__(self) -> str:
        return f"adapter {self.name!r} ({self.path})"


class Adapters:
    """The adapters of one engine, used from one event loop. They are read and laid out on other
    threads while steps go on.

    A slot is taken before files are read. A request that waits for a slot keeps no other from the
    adapters in memory, except the one that is to be evicted.
    """

    def __init__(
        self, config: EngineConfig, runner: RunnerInterface, metrics: AdapterMetrics
    ) -> None:
        """`load_configured` loads those of the settings."""
        self._metrics = metrics
        metrics.get_places = self._places
        self._config = config
        self._runner = runner
        self._named: dict[str, _Adapter] = {}
        self._resident: set[_Adapter] = set()  # those that have a place
        self._arriving: set[str] = set()  # names that are being loaded for the first time
        self._queue = asyncio.Lock()  # of requests that wait for a place
        self._leaving: _Adapter | None = None  # gets no new users: a request waits for its place
        self._freed = asyncio.Event()
        self._disk = asyncio.Lock()  # one is read after another
        self._uses = itertools.count(1)
        self._is_closed = False
        self._keeps_out = False  # those that are not loaded yet: the weights change
        self._stands_still = False  # holds `_disk`: there are no weights to put one on

    @property
    def paths(self) -> dict[str, Path]:
        """The directories of adapters by name, in the order in which they were loaded."""
        return {name: adapter.path for name, adapter in self._named.items()}

    @property
    def ids(self) -> dict[str, str]:
        """Ids of the adapters in memory by name, which tell their cached prefixes from others'."""
        return {name: known.adapter_id for name, known in self._named.items() if known.adapter_id}

    def _places(self) -> Places:
        names = sorted((known.reading is not None, known.name) for known in self._resident)
        return (
            [name for is_read, name in names if not is_read],
            [name for is_read, name in names if is_read],
            self._config.adapters.max_cpu_loras,
        )

    @property
    def served(self) -> list[str]:
        """Names that can be asked for, or are about to be."""
        return list(dict.fromkeys((*self._named, *self._arriving)))

    @property
    def bound(self) -> list[str]:
        """Names of adapters that bring weights of the model itself, which fit no other weights: of
        those that are served and of those that requests still have.
        """
        users = (adapter for adapter in self._resident if adapter.num_users)
        known = (*self._named.values(), *users)
        return list(dict.fromkeys(adapter.name for adapter in known if adapter.is_bound))

    @contextmanager
    def keeping_out(self, keeps_out: bool = True) -> Iterator[None]:
        """Inside the block the weights change: none can be loaded."""
        self._keeps_out = keeps_out
        try:
            yield
        finally:
            self._keeps_out = False

    async def stand_still(self) -> None:
        """Finish what is being read, and read nothing until `go_on`: requests wait for it."""
        if not self._stands_still:
            await self._disk.acquire()
            self._stands_still = True

    def go_on(self) -> None:
        """Let adapters be read from the disk again after `stand_still`. Idempotent."""
        if self._stands_still:
            self._stands_still = False
            self._disk.release()

    async def load_configured(self) -> None:
        """Load the LoRA adapters of the settings. Raises `ConfigError`."""
        for spec in self._config.adapters.lora:
            name, is_pair, path = spec.partition("=")
            if not (is_pair and name and path):
                raise ConfigError(f"adapters.lora must be NAME=PATH, got {spec!r}")
            await self.load(name, path)

    async def load(self, name: str, path: str) -> None:
        """Give an adapter a name. Raises `ConfigError` for a name that is in use, and for files
        that are no adapter of this model, and while its weights change; `EngineDeadError` when
        there is no more model.
        """
        if not name.isprintable() or not name.strip() or not path:
            raise ConfigError(f"an adapter needs a name and a path, got {name!r} and {path!r}")
        if name in self._config.model.served_names:
            raise ConfigError(f"adapter name {name!r} is the model's own")
        if self._keeps_out:
            raise ConfigError(f"adapter {name!r}: the weights are about to change: try again later")
        if self._stands_still:
            raise ConfigError(f"adapter {name!r}: the engine is asleep: wake it first")
        if name in self._named or name in self._arriving:
            raise ConfigError(f"adapter name {name!r} is in use: unload it first")
        adapter = _Adapter(name, path)
        self._arriving.add(name)
        try:
            self._make_room()  # if all are in use, it goes again as soon as it was checked
            await self._use(adapter)
            self._named[name] = adapter
            self._let_go(adapter)
            self._make_room(0)
        finally:
            self._arriving.remove(name)
        logger.info("loaded %r", adapter)

    def unload(self, name: str) -> None:
        """Forget a name: requests that have it finish. Raises `UnknownModelError`."""
        adapter = self._known(name)
        del self._named[name]
        self._metrics.requests.pop(name, None)
        num_users = adapter.num_users
        if not num_users:
            self._evict(adapter)
        self._freed.set()  # requests that wait for a place for it need not
        logger.info("unloaded %r; %d requests go on with it", adapter, num_users)

    def refuse(self) -> None:
        """End all waits with `EngineDeadError`, and read nothing more."""
        self._is_closed = True
        self._freed.set()
        self.go_on()

    async def close(self) -> None:
        """`refuse`, and return when the files being read are done."""
        self.refuse()
        if readings := [adapter.reading for adapter in self._resident if adapter.reading]:
            await asyncio.wait(readings)

    def check_name(self, name: str) -> None:
        """Raises `UnknownModelError` if it is neither the model's nor an adapter's."""
        if name not in self._config.model.served_names:
            self._known(name)

    async def hold(self, samples: Samples, name: str, seconds: float | None) -> None:
        """Have the adapter of that name in memory until the `samples` have ended, which are told
        its id. Waits for a place, and for the files, if need be, unless the samples are aborted.
        Nothing to do for the model's own.

        Raises `UnknownModelError`, `RequestTimeoutError` after `seconds`, `EngineDeadError`,
        and `RequestFailedError` if its files cannot be read any more.
        """
        if name in self._config.model.served_names:
            return
        try:
            async with asyncio.timeout(0.0 if samples.is_aborted else seconds) as wait:
                samples.let_go = lambda: None if wait.expired() else wait.reschedule(0.0)
                adapter = await self._have_place(name)
                await self._use(adapter)
        except TimeoutError:
            if not samples.is_aborted:
                raise RequestTimeoutError(
                    f"adapter {name!r} was not loaded within the request's timeout"
                ) from None
            return
        except ConfigError as error:
            raise RequestFailedError(f"cannot load {adapter!r} again: {error}") from error
        finally:
            samples.let_go = None
        self._metrics.requests[name] += 1
        samples.adapter_id = adapter.adapter_id

        def let_go() -> None:
            samples.let_go = None
            self._let_go(adapter)

        samples.let_go = let_go

    async def _have_place(self, name: str) -> _Adapter:
        """Return the adapter of that name, once it has a place or there is one for it."""
        adapter = self._known(name)
        if adapter in self._resident and adapter is not self._leaving:
            return adapter
        async with self._queue:
            try:
                while True:
                    self._check_open()
                    adapter = self._known(name)  # it may be another by now
                    if adapter in self._resident or self._make_room():
                        return adapter
                    self._leaving = self._least_recent()
                    self._freed.clear()
                    await self._freed.wait()
            finally:
                self._leaving = None

    async def _use(self, adapter: _Adapter) -> None:
        """Keep the adapter in memory until `_let_go`: give it a place, and read it if it is not
        there.
        """
        adapter.last_used = next(self._uses)
        adapter.num_users += 1
        if adapter not in self._resident:
            self._resident.add(adapter)
            self._metrics.num_resident = len(self._resident)
            adapter.num_users += 1
            adapter.reading = asyncio.create_task(self._read(adapter))
        try:
            if adapter.reading is not None:
                await asyncio.shield(adapter.reading)
        except BaseException:
            self._let_go(adapter)
            raise

    async def _read(self, adapter: _Adapter) -> None:
        """Into memory, and into the runner's. Gives its place back if that fails."""
        read_adapter = load("engine", "adapter files")
        try:
            async with self._disk:
                self._check_open()
                max_rank = self._config.adapters.max_lora_rank
                files = await asyncio.to_thread(read_adapter, adapter.path, max_rank)
                adapter.is_bound = bool(files.base_weights)
                adapter.adapter_id = f"{adapter.name}@{files.digest}"
                await self._runner.load_adapter(adapter.adapter_id, files)
            self._metrics.num_loads += 1
        except BaseException as error:
            self._evict(adapter)
            if isinstance(error, RunnerDeadError):
                raise EngineDeadError(f"cannot load {adapter!r}: {error}") from error
            raise
        finally:
            adapter.reading = None
            self._let_go(adapter)

    def _make_room(self, num_more: int = 1) -> bool:
        """Return whether there is room for `num_more` adapters; evicts unused ones for it."""
        while len(self._resident) + num_more > self._config.adapters.max_cpu_loras:
            victim = self._least_recent()
            if victim is None or victim.num_users:
                return False
            self._evict(victim)
            self._metrics.num_evictions += 1
        return True

    def _least_recent(self) -> _Adapter | None:
        """Return the adapter in memory to evict next: an unused one before all others."""
        return min(self._resident, key=lambda a: (a.num_users > 0, a.last_used), default=None)

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
            self._freed.set()
            gone, adapter.adapter_id = adapter.adapter_id, ""
            # The same files may have been given the same name again meanwhile.
            if gone and all(other.adapter_id != gone for other in self._resident):
                self._runner.unload_adapter(gone)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("the engine is shutting down")

    def _known(self, name: str) -> _Adapter:
        adapter = self._named.get(name)
        if adapter is None:
            raise UnknownModelError.of(name, (*self._config.model.served_names, *self._named))
        return adapter
