"""Moves requests between simulated replicas with their KV blocks, at a price in seconds.

The one link of a replica carries one copy at a time, from it or to it. Knows when copies end and
what moves then. Does not know why a router wants it.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from aioserve.errors import EngineOverloadedError
from aioserve.lab.simulation.fleet_outcome import FleetOutcome
from aioserve.lab.simulation.fleet_seat import Seat
from aioserve.lab.simulation.stepped_engine import SteppedEngine
from aioserve.request import Request
from aioserve.routing import Assignment, Dispatcher


class FleetRun(Protocol):
    """What a run of a fleet does for handovers."""

    def at(self, when: float, happens: Callable[[], None]) -> None:
        """Have something happen at a time."""

    def catch_up(self, seat: Seat, engine: SteppedEngine) -> None:
        """Account for steps that have been booked ahead."""

    def has_changed(self, seat: Seat) -> None:
        """The requests of a replica are others: routers hear of it, and it goes on with them."""

    def end_lost(self, number: int, request: Request) -> None:
        """A request has ended with an error."""


class Moving(NamedTuple):
    """A request that no replica has while its KV blocks are on the way."""

    number: int  # in the workload
    request: Request
    assignment: Assignment
    source: Seat
    engine: SteppedEngine  # of the source, as it was when the copy began


class Handovers:
    """All copies of one run. Times are seconds of `clock`."""

    def __init__(
        self,
        run: FleetRun,
        dispatcher: Dispatcher,
        outcome: FleetOutcome,
        clock: Callable[[], float],
        *,
        token_seconds: float,
    ) -> None:
        """`token_seconds` is what the KV cache of a token takes from one replica to another."""
        #: Prompt tokens that each moved request had found cached at first, by its number.
        self.num_cached: dict[int, int] = {}
        self._run = run
        self._dispatcher = dispatcher
        self._outcome = outcome
        self._clock = clock
        self._token_seconds = token_seconds
        self._free_at: dict[str, float] = {}  # of the link of each replica
        self._copied: set[str] = set()  # ids of requests that are being copied while they decode

    def hand_over(self, source: Seat, request_id: str, target: Seat) -> None:
        """The request is copied and then goes on at `target`; it makes no token meanwhile."""
        self._hand_over_rest(source, request_id, target, num_copied=0)

    def migrate(self, source: Seat, request_id: str, target: Seat) -> None:
        """The request is copied while it goes on decoding; then it stops for the copy of what it
        has written meanwhile. It stays where it is if `target` has no room at the end.
        """
        if source is target or request_id in self._copied or source.engine is None:
            return
        self._copied.add(request_id)
        engine, request = source.engine, source.live[request_id][1]
        begin = request.num_tokens
        end = self._copy(source, target, begin)
        self._run.at(end, lambda: self._switch(source, engine, request_id, target, begin))

    def _switch(
        self, source: Seat, engine: SteppedEngine, request_id: str, target: Seat, begin: int
    ) -> None:
        """The first copy of a migration is complete."""
        self._copied.discard(request_id)
        if source.engine is not engine or request_id not in source.live:
            return  # it has died, or the request has ended
        self._run.catch_up(source, engine)
        request = source.live[request_id][1]
        other = target.engine
        if other is None or target.name not in self._dispatcher.names:
            return
        self._run.catch_up(target, other)
        if not other.has_room_for(request):
            return
        self._hand_over_rest(source, request_id, target, begin)

    def _hand_over_rest(self, source: Seat, request_id: str, target: Seat, num_copied: int) -> None:
        """The request stops, and goes on at `target` once what is not copied yet is there."""
        engine = source.engine
        assert engine is not None
        number, request, assignment = self._detach(source, engine, request_id)
        moving = Moving(number, request, assignment, source, engine)
        end = self._copy(source, target, request.num_tokens - num_copied)
        self._run.at(end, lambda: self._attach(moving, target))

    def _copy(self, source: Seat, target: Seat, num_tokens: int) -> float:
        """When a copy that is asked for now is complete."""
        free = (self._free_at.get(seat.name, 0.0) for seat in (source, target))
        end = max(self._clock(), *free) + self._token_seconds * num_tokens
        self._free_at[source.name] = self._free_at[target.name] = end
        return end

    def _detach(
        self, seat: Seat, engine: SteppedEngine, request_id: str
    ) -> tuple[int, Request, Assignment]:
        """The replica has the request no more, but for its cached blocks."""
        self._run.catch_up(seat, engine)
        number, request, assignment = seat.live.pop(request_id)
        self.num_cached.setdefault(number, request.num_cached_tokens)
        engine.observer.end_series()
        times, now = self._outcome.requests[number].token_times, self._clock()
        while times and times[-1] > now:  # of the step in flight, which comes back for others
            times.pop()
        request = engine.release(request_id)
        seat.num_leaving += 1
        self._run.has_changed(seat)
        return number, request, assignment

    def _attach(self, moving: Moving, target: Seat) -> None:
        """The blocks are there. If the target has died meanwhile, goes, or refuses the request, it
        goes on where it was; if that has died, too, the request is lost.
        """
        source = moving.source
        source.num_leaving -= 1
        if source.engine is not moving.engine:
            self._lose(moving)
        elif target.name in self._dispatcher.names and self._goes_on_at(target, moving):
            self._outcome.num_moved += 1
            self._outcome.replica_of[moving.number] = target.place
            self._dispatcher.move(moving.assignment, target.name)
        elif not self._goes_on_at(source, moving):
            self._lose(moving)
        for seat in {source: None, target: None}:
            self._run.has_changed(seat)

    def _goes_on_at(self, seat: Seat, moving: Moving) -> bool:
        """Have a replica take the request in; False if it is down or has too many."""
        engine, request = seat.engine, moving.request
        if engine is None:
            return False
        self._run.catch_up(seat, engine)
        try:
            engine.take_in(request)
        except EngineOverloadedError:
            return False
        seat.live[request.request_id] = moving.number, request, moving.assignment
        return True

    def _lose(self, moving: Moving) -> None:
        moving.assignment.has_ended()
        self._run.end_lost(moving.number, moving.request)
