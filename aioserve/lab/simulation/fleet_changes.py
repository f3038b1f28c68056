"""What changes in a simulated fleet while it runs: requests move, replicas restart, come and go.

Knows when copies end and what moves then, the order of rolling restarts, and what the autoscaler
wants. Does not know why a router moves a request, nor what a restart is.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError, EngineOverloadedError, place_of
from aioserve.fleet.routing import (
    Assignment,
    AutoscalerInterface,
    Dispatcher,
    FleetView,
    ReplicaView,
    RoutedRequest,
    RouterError,
    blamed,
    load_autoscaler,
    short_name,
)
from aioserve.lab.simulation.fleet_replicas import FleetOutcome, Seat
from aioserve.lab.simulation.stepped_engine import SteppedEngine
from aioserve.lab.workloads.workload import Deploy
from aioserve.request import Request


class Chosen(Protocol):
    """The choice that a fleet file names, with or without options."""

    @property
    def spec(self) -> str:
        """A name, `package.module:Class` or a file."""

    @property
    def name(self) -> str:
        """The name that tables have; "" for that of the class."""

    @property
    def shown(self) -> str:
        """The name that tables show."""

    def check(self) -> None:
        """Raise `ConfigError` for a class that there is not, or options that it has not."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what a fleet file names with options; a class adds its `spec`, and loads it."""

    options: dict[str, Any] = {}
    name: str = ""  # in tables (default: the name of the class)

    @property
    def shown(self: Chosen) -> str:
        """The name that tables show."""
        return self.name or short_name(self.spec)


def check_choices(choices: Sequence[Chosen], word: str) -> None:
    """Raise `ConfigError` if one of them cannot be, or two have one name in tables. `word` says
    what they are, as `a router`.
    """
    for choice in choices:
        choice.check()
    shown = [choice.shown for choice in choices]
    if len(set(shown)) < len(shown):
        raise ConfigError(f"{word} is named twice: {', '.join(shown)}")


# Moves of requests, and what the fleet is told of restarts and of the autoscaler.


class FleetRun(Protocol):
    """The part of a fleet's run that handovers and deploys ask."""

    def at(self, when: float, happens: Callable[[], None]) -> None:
        """Have something happen at a time."""

    def catch_up(self, seat: Seat, engine: SteppedEngine) -> None:
        """Account for steps that have been booked ahead."""

    def has_changed(self, seat: Seat) -> None:
        """The requests of a replica are others: routers hear of it, and it goes on with them."""

    def end_lost(self, number: int, request: Request) -> None:
        """A request has ended with an error."""

    def drain(self, seat: Seat) -> None:
        """The replica gets no new requests."""

    def kill(self, seat: Seat) -> None:
        """Restart the replica although it has requests."""

    def come_back(self, seat: Seat) -> None:
        """The replica serves again, with nothing in its memory."""


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
        """Return when a copy that is asked for now is complete."""
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


# Rolling restarts: replicas drain, restart and come back, one after another.


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
        """Return whether the replica restarts as soon as it has no requests."""
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


# How many replicas there are: the autoscaler is asked, and who starts is known.


Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]


class AutoscalerChoice(Choice, frozen=True, kw_only=True):
    """An autoscaler with options, as a fleet file has it beside those that are plain names."""

    autoscaler: str  # a name, package.module:Class or a file

    @property
    def spec(self) -> str:
        """A name, `package.module:Class` or a file."""
        return self.autoscaler

    def check(self) -> None:
        """Raise `ConfigError` for an autoscaler that there is not, or options that it has not."""
        load_autoscaler(self.autoscaler).parse_options(self.options)


class Autoscaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scaling of a fleet: between how many replicas, by which autoscalers in turn."""

    autoscalers: Annotated[tuple[str | AutoscalerChoice, ...], Meta(min_length=1)]
    min_replicas: Count = 1
    startup_seconds: NonNegative = 30.0  # until a new replica serves; it is paid for from the start
    interval: Positive = 5.0  # seconds from one question to the next

    @property
    def choices(self) -> tuple[AutoscalerChoice, ...]:
        """The autoscalers, each with its options."""
        return tuple(
            AutoscalerChoice(autoscaler=each) if isinstance(each, str) else each
            for each in self.autoscalers
        )

    def check(self, max_replicas: int, num_roles: int = 0) -> None:
        """Raises `ConfigError` for what cannot be: each of the roles keeps one replica at least."""
        if self.min_replicas < num_roles:
            raise ConfigError(
                f"autoscaling.min_replicas is {self.min_replicas}, but the groups have "
                f"{num_roles} roles, of which each keeps one replica at least"
            )
        if self.min_replicas > max_replicas:
            raise ConfigError(
                f"autoscaling.min_replicas is {self.min_replicas}, above the {max_replicas} "
                "replicas of the fleet"
            )
        check_choices(self.choices, "an autoscaler")


class Scaling:
    """One autoscaler at work on one run. Seats are known by their places."""

    def __init__(
        self, plan: Autoscaling, num_seats: int, *, seed: int, clock: Callable[[], float]
    ) -> None:
        """`plan` names exactly one autoscaler. Raises `RouterError` if it cannot be made."""
        (choice,) = plan.choices
        self.plan = plan
        self.starting: set[int] = set()  # places of replicas that do not serve yet
        self.draining: set[int] = set()  # that get nothing new and finish what they have
        self._kind = load_autoscaler(choice.autoscaler)
        self._num_seats = num_seats
        self._num_arrived = self._num_arrived_tokens = 0
        with blamed(self._kind, "__init__()"):
            self._autoscaler: AutoscalerInterface = self._kind(
                choice.options, seed=seed, clock=clock
            )

    def has_arrived(self, request: RoutedRequest) -> None:
        """Count a request that has reached the fleet, for the view of the next decision."""
        self._num_arrived += 1
        self._num_arrived_tokens += request.num_tokens

    def has_started(self, request: RoutedRequest, now: float) -> None:
        """The first token of a request has come."""
        with blamed(self._kind, "on_first_token()"):
            self._autoscaler.on_first_token(request, now - request.arrival_time)

    def num_wanted(self, replicas: tuple[ReplicaView, ...]) -> int:
        """Replicas that there should be, those that start included. Raises `RouterError`."""
        fleet = FleetView(
            replicas=replicas,
            num_starting=len(self.starting),
            min_replicas=self.plan.min_replicas,
            max_replicas=self._num_seats,
            startup_seconds=self.plan.startup_seconds,
            interval=self.plan.interval,
            num_arrived=self._num_arrived,
            num_arrived_tokens=self._num_arrived_tokens,
        )
        self._num_arrived = self._num_arrived_tokens = 0
        with blamed(self._kind, "decide()"):
            wanted = self._autoscaler.decide(fleet)
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise RouterError(
                f"{self._kind.__name__}: decide() must return a whole number of replicas, got "
                f"{wanted!r:.100}{place_of(self._kind, 'decide')}"
            )
        return min(max(wanted, self.plan.min_replicas), self._num_seats)


# Roles of the replicas of a fleet that is scaled: each keeps one replica at least.


def missing_roles(seats: Sequence[Seat], present: Sequence[Seat]) -> list[str]:
    """Roles of `seats` that none of `present` has, in order; replicas that do all have none."""
    found = {seat.role for seat in present}
    return [
        role for role in dict.fromkeys(seat.role for seat in seats) if role and role not in found
    ]


def first_of_roles(seats: Sequence[Seat], missing: Sequence[str]) -> list[Seat]:
    """Return the same seats, the first one of each of the missing roles before all others."""
    ahead = [
        next(seat for seat in seats if seat.role == role)
        for role in missing
        if any(seat.role == role for seat in seats)
    ]
    return [*ahead, *(seat for seat in seats if seat not in ahead)]


def spare(seats: Sequence[Seat]) -> Iterator[Seat]:
    """Yield those of the seats that can go, in order, with one of each role left."""
    left = Counter(seat.role for seat in seats)
    for seat in seats:
        if not seat.role or left[seat.role] > 1:
            left[seat.role] -= 1
            yield seat
