"""Rolling restarts of a simulated fleet: replicas drain, restart and come back, one after another.

Knows the order of replicas. What a restart is, the run of the fleet knows.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from aioserve.lab.simulation.fleet_seat import Seat
from aioserve.lab.workloads.incidents import Deploy


class FleetRun(Protocol):
    """What a run of a fleet does for deploys."""

    def at(self, when: float, happens: Callable[[], None]) -> None:
        """Have something happen at a time."""

    def drain(self, seat: Seat) -> None:
        """The replica gets no new requests."""

    def kill(self, seat: Seat) -> None:
        """The replica restarts although it has requests."""

    def come_back(self, seat: Seat) -> None:
        """The replica serves again, with nothing in its memory."""


class Deploys:
    """All rolling restarts of one run. Times are seconds of `clock`."""

    def __init__(self, run: FleetRun, seats: Iterable[Seat], clock: Callable[[], float]) -> None:
        self._run = run
        self._seats = list(seats)
        self._clock = clock
        self._draining: dict[Seat, tuple[Deploy, Iterator[Seat]]] = {}

    def plan(self, deploys: Iterable[Deploy]) -> None:
        """Have the deploys begin at their times."""
        for deploy in deploys:
            self._run.at(deploy.at, partial(self._begin, deploy))

    def is_draining(self, seat: Seat) -> bool:
        """Whether the replica restarts as soon as it has no requests."""
        return seat in self._draining

    def has_drained(self, seat: Seat) -> None:
        """The replica has no requests any more, and is down from now on."""
        deploy, seats = self._draining.pop(seat)

        def up() -> None:
            self._run.come_back(seat)
            self._next(deploy, seats)

        self._run.at(self._clock() + deploy.down, up)

    def has_died(self, seat: Seat) -> None:
        """The replica has died while it drained: what becomes of it is not the deploy's."""
        deploy, seats = self._draining.pop(seat)
        self._next(deploy, seats)

    def _begin(self, deploy: Deploy) -> None:
        seats = iter(self._seats)
        for _ in range(deploy.at_once):
            self._next(deploy, seats)

    def _next(self, deploy: Deploy, seats: Iterator[Seat]) -> None:
        """Drain the next replica that is up and does not drain already."""
        for seat in seats:
            if seat.engine is not None and seat not in self._draining:
                self._draining[seat] = deploy, seats
                if deploy.drain is not None:
                    when = self._clock() + deploy.drain
                    self._run.at(when, partial(self._force, seat, deploy))
                self._run.drain(seat)
                return

    def _force(self, seat: Seat, deploy: Deploy) -> None:
        if seat in self._draining and self._draining[seat][0] is deploy:
            self._run.kill(seat)
