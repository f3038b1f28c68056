"""An operator stops an engine from computing, frees its memory, changes its weights."""

from typing import TYPE_CHECKING

import msgspec

from aioserve.errors import EngineDeadError, RequestError
from aioserve.operations.answers import Arrivals, Running, State
from aioserve.operations.command import Asking, FilePath, Http, OperatorCommand

if TYPE_CHECKING:
    from aioserve.engine import AsyncEngine


class EngineState(msgspec.Struct, frozen=True):
    """Whether the engine computes, is paused or sleeps."""

    state: State


class Pause(OperatorCommand[EngineState, EngineState], frozen=True):
    """No step is computed until `/admin/resume`. `"running"`: `"keep"` (the default) has requests
    go on where they were, `"abort"` ends them with what they have. `"arrivals"`: those that come
    meanwhile `"wait"` (the default) in the queue and its limits, or are refused (`"refuse"`): 503
    with code `engine_paused` and `Retry-After`.
    """

    running: Running = "keep"
    arrivals: Arrivals = "wait"

    http = Http("/admin/pause", "Compute no further step; requests wait, or are ended.")

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.pause(running=self.running, arrivals=self.arrivals)
        return EngineState(engine.state)


class Resume(OperatorCommand[EngineState, EngineState], frozen=True):
    """Steps are computed again after a pause."""

    http = Http("/admin/resume", "Go on after a pause.", raises=(EngineDeadError, RequestError))

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.resume()
        return EngineState(engine.state)


class Sleep(OperatorCommand[EngineState, EngineState], frozen=True):
    """As `/admin/pause`, and the memory of the KV cache is given back, with `"weights": true` that
    of the model as well: kept requests are computed again after `/admin/wake`.
    """

    weights: bool = False
    running: Running = "keep"
    arrivals: Arrivals = "wait"

    http = Http(
        "/admin/sleep",
        "Pause, and give back the memory of the KV cache, or of the weights as well.",
    )

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.sleep(weights=self.weights, running=self.running, arrivals=self.arrivals)
        return EngineState(engine.state)


class Wake(OperatorCommand[EngineState, EngineState], frozen=True):
    """The engine takes the memory again, reads the weights if they went, and goes on."""

    http = Http("/admin/wake", "Take it again, and go on.", raises=(EngineDeadError, RequestError))

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.wake()
        return EngineState(engine.state)


class Reload(OperatorCommand[EngineState, EngineState], frozen=True):
    """The weights of the model directory `"path"` are served, which must be the same model but for
    them; cached prefixes are forgotten. Kept requests go on after the tokens that they have. There
    has to be memory for both; if anything is wrong, the old ones go on. An engine that sleeps wakes
    up, and a pause stays.
    """

    path: FilePath
    running: Running = "keep"

    http = Http("/admin/reload", "Serve other weights of the same model.", param="path")

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.reload(self.path, running=self.running)
        return EngineState(engine.state)


class ControlMethods(Asking):
    """The same from Python, as the methods of `AsyncEngine` that have these names."""

    async def pause(self, *, running: Running = "keep", arrivals: Arrivals = "wait") -> None:
        """Return when no step is computed, and none will be until `resume`.

        `running`: what becomes of requests that run or wait. `arrivals`: whether those that come
        meanwhile wait, or get `EnginePausedError`.
        """
        await self.ask(Pause(running, arrivals))

    async def resume(self) -> None:
        """Go on. Raises `RequestError` for an engine that sleeps."""
        await self.ask(Resume())

    async def sleep(
        self, *, weights: bool = False, running: Running = "keep", arrivals: Arrivals = "wait"
    ) -> None:
        """Pause, and give back the memory of the KV cache, with `weights` that of the model too."""
        await self.ask(Sleep(weights, running, arrivals))

    async def wake(self) -> None:
        """Take back what `sleep` gave, and go on."""
        await self.ask(Wake())

    async def reload(self, path: str, *, running: Running = "keep") -> None:
        """Serve the weights of a model directory of the server's machine."""
        await self.ask(Reload(path, running))
