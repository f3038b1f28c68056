"""What a server asks an engine for its own routes: no operator gives these commands."""

from typing import TYPE_CHECKING

from msgspec import field

from aioserve.operations.answers import Counted, Health, Seen
from aioserve.operations.command import EngineCommand

if TYPE_CHECKING:
    from aioserve.engine import AsyncEngine


class HealthCheck(EngineCommand[Health], frozen=True):
    """How the engine is; one that is dead answers, too."""

    async def run_on(self, engine: "AsyncEngine") -> Health:
        return engine.health()


class ShowMetrics(EngineCommand[bytes], frozen=True):
    """Prometheus' text, of the whole. `counted` is what a server in the engine's process has
    counted; other processes are asked for theirs.
    """

    counted: list[Counted] = field(default_factory=list)

    async def run_on(self, engine: "AsyncEngine") -> bytes:
        return engine.render_metrics(self.counted)


class ShowSteps(EngineCommand[Seen], frozen=True):
    """As `LiveFeed.look`: answered when there is something to see."""

    after: int

    async def run_on(self, engine: "AsyncEngine") -> Seen:
        return await engine.look(self.after)


class AbortElsewhere(EngineCommand[bool], frozen=True):
    """Ends a request, or a response of several, of another front end; whether there was one."""

    request_id: str
    reach: str = ""  # the owner that it must have; "" matches every owner

    async def run_on(self, engine: "AsyncEngine") -> bool:
        """An engine that is asked directly has no other front end."""
        return False
