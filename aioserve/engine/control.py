"""What an operator does to an engine that serves: pause it, put it to sleep, give it other weights.

Knows in which order scheduler and runner have to hear of it. Between two of these nothing is lost:
a request that was kept goes on where it was, computed again if its blocks or weights are gone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aioserve.config import EngineConfig
from aioserve.engine.adapters import Adapters
from aioserve.engine.core import EngineCore
from aioserve.engine.operations.command import Arrivals, Running, State
from aioserve.errors import ConfigError, EngineDeadError, EnginePausedError, InvariantError
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler import BaseScheduler
from aioserve.scheduler.delegate import DelegatingScheduler, chain, innermost

logger = logging.getLogger(__name__)

# Seconds after which a refused client is told to come again. The true time is unknown: a guess.
RETRY_SECONDS = 5.0


class Control:
    """The commands that pause, wake or reload one engine: one at a time, and a second one waits."""

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        runner: RunnerInterface,
        adapters: Adapters,
        abort_all: Callable[[], object],
    ) -> None:
        self.state: State = "running"
        self.arrivals: Arrivals = "wait"
        self._config = config
        self._core = core
        self._runner = runner
        self._adapters = adapters
        self._abort_all = abort_all
        self._lock = asyncio.Lock()
        self._is_ending = False

    def check_arrival(self) -> None:
        """Raises `EnginePausedError` if a new request is to be refused."""
        if self.state != "running" and self.arrivals == "refuse":
            raise EnginePausedError(f"the engine is {self.state}: try again later", RETRY_SECONDS)

    async def pause(self, running: Running, arrivals: Arrivals) -> None:
        """Return when no step is computed, and none will be. An engine that sleeps sleeps on."""
        async with self._turn():
            await self._pause(running, arrivals)

    async def resume(self) -> None:
        """Go on. Raises `ConfigError` if it sleeps: it has to be woken."""
        async with self._turn():
            if self.state == "asleep":
                raise ConfigError("the engine is asleep: wake it, which resumes it as well")
            self._resume()

    async def sleep(self, running: Running, arrivals: Arrivals, *, frees_weights: bool) -> None:
        """Pause, and give back the memory of the KV cache, or that of the weights as well. Raises
        `ConfigError` if that is not served; nothing has changed then. If the policy raises while
        its requests give way, they have failed, and the engine goes on.
        """
        async with self._turn():
            if self.state == "asleep":
                raise ConfigError("the engine is asleep already: wake it first")
            self._check("sleep", running)
            self._runner.check_sleep(frees_weights=frees_weights)
            before = self.state
            with self._adapters.keeping_out(frees_weights):
                await self._pause(running, arrivals)
                try:
                    if frees_weights:
                        await self._adapters.stand_still()
                    self._check_kept("sleep", running)
                    await self._vacate()
                    await self._runner.sleep(frees_weights=frees_weights)
                except BaseException:
                    self._adapters.go_on()
                    if before == "running":
                        self._resume()
                    raise
                self.state = "asleep"
            logger.info("asleep; the weights are %s", "freed" if frees_weights else "kept")

    async def wake(self) -> None:
        """Have what `sleep` gave back, and go on. Raises `ConfigError` if there is no memory for it
        any more, or the files are gone: it sleeps on then.
        """
        async with self._turn():
            if self.state != "asleep":
                raise ConfigError(f"the engine is {self.state}, not asleep")
            await self._runner.wake()
            self._adapters.go_on()
            self._resume()

    async def reload(self, path: str, running: Running) -> None:
        """The weights of the model in directory `path`, which is the same but for them. Raises
        `ConfigError`, before anything has changed, for another model and where that is not served;
        and if they cannot be read or have no room: the old ones go on then, or are loaded again
        where they were freed first, and kept requests are computed again.

        A pause stays a pause; an engine that sleeps is woken.
        """
        async with self._turn():
            self._check("reload", running)
            before = self.state
            with self._adapters.keeping_out():
                await self._runner.check_weights(path)
                await self._pause(running, "wait" if before == "running" else self.arrivals)
                try:
                    self._check_kept("reload", running)
                    await self._adapters.stand_still()
                    if before != "asleep":
                        await self._vacate()
                    await self._runner.load_weights(path)
                    if (connector := self._core.loop.scheduler.get_kv_connector()) is not None:
                        await connector.change_weights(path)
                    self.state = "running" if before == "asleep" else before
                    logger.info("the weights are those of %s", path)
                except BaseException:
                    self.state = before
                    raise
                finally:
                    if self.state != "asleep":
                        self._adapters.go_on()
                    if self.state == "running":
                        self._core.loop.resume()

    def let_go(self) -> bool:
        """The engine ends: requests may finish, and nothing else is begun. To be called until they
        have: what goes on is done first. False if they cannot, because it sleeps.
        """
        self._is_ending = True
        if self._lock.locked():
            return True
        if self.state == "paused":
            self._resume()
        return self.state == "running"

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._is_ending:
            raise EngineDeadError("the engine is shutting down")

    async def _pause(self, running: Running, arrivals: Arrivals) -> None:
        if self.state == "running":
            self.state = "paused"
            logger.info("paused")
        self.arrivals = arrivals
        await self._core.pause()
        if running == "abort":
            self._abort_all()

    def _resume(self) -> None:
        if self.state != "running":
            self.state = "running"
            logger.info("resumed")
        self._core.loop.resume()

    async def _vacate(self) -> None:
        """Take their blocks from all requests, and forget what was cached."""
        await self._core.vacate()
        if not self._core.loop.scheduler.reset_prefix_cache():
            raise InvariantError("a request has kept its blocks")

    def _check(self, what: str, running: Running) -> None:
        """Raises `ConfigError` where blocks, or weights, cannot be given up."""
        config = self._config
        if not isinstance(innermost(self._core.loop.scheduler), BaseScheduler):
            raise ConfigError(f"{what}: the policy must derive from BaseScheduler")
        if running == "keep" and config.scheduler.decision_log is not None:
            raise ConfigError(
                f"{what}: a decision log does not tell that requests lose their blocks: abort "
                "them (running: abort), or serve without scheduler.decision_log"
            )
        if what == "reload":
            _check_adapters(self._adapters.bound)
        if running == "keep":
            self._check_trial(what)

    def _check_kept(self, what: str, running: Running) -> None:
        """Check again in the pause, when nothing comes between: work may have begun meanwhile."""
        self._check_open()
        if what == "reload":
            _check_adapters(self._adapters.bound)
        if running == "keep":
            self._check_trial(what)

    def _check_trial(self, what: str) -> None:
        watchers = chain(self._core.loop.scheduler)
        if any(isinstance(one, DelegatingScheduler) and one.is_recording for one in watchers):
            raise ConfigError(
                f"{what}: the traffic is recorded to try a policy on, and a recording does not "
                "tell that requests lose their blocks: abort them (running: abort), or wait"
            )


def _check_adapters(names: list[str]) -> None:
    if names:
        raise ConfigError(
            "reload: some adapters replace weights of the model itself: unload them first, and let "
            f"their requests end ({', '.join(names)})"
        )
