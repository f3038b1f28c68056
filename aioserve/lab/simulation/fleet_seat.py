"""A place in a simulated fleet: the engine that has it now, and the requests that it serves.

Plain state, which the run of the fleet changes.
"""

import math

from aioserve.lab.simulation.stepped_engine import SteppedEngine
from aioserve.request import Request
from aioserve.routing import Assignment, ReplicaReport


class Seat:
    """A place in the fleet: the engine that has it now, if it is up, and the requests it serves."""

    def __init__(self, place: int, role: str = "", slowdown: float = 1.0) -> None:
        """`slowdown` is the factor by which its steps are always longer than the model says."""
        self.place = place
        self.name = f"replica-{place}"
        self.role = role
        self.known_at = 0.0  # when the engine last took a request, a step or an expiry
        self.engine: SteppedEngine | None = None
        self.load: tuple[int, int, float] | None = None  # None: the engine has to be asked
        self.slowdowns = [slowdown]  # that last now, each times the others
        self.live: dict[str, tuple[int, Request, Assignment]] = {}  # by request id
        self.num_leaving = 0  # requests whose blocks are on their way to another replica
        self.num_turns = 0  # made or planned: a turn that is planned anew makes the old one void
        self.due = math.inf  # the deadline for which deadlines will be looked at, and when
        self.expiry = math.inf
        self.has_failed = False  # and has not come back
        self.paid_since: float | None = None  # None: it is not paid for

    @property
    def slowdown(self) -> float:
        """The factor by which its steps are longer than the model says."""
        return math.prod(self.slowdowns, start=1.0)

    def reported(self) -> tuple[ReplicaReport, float]:
        """What the replica says of itself, and when it was so."""
        engine = self.engine
        return ReplicaReport() if engine is None else engine.report(), self.known_at
