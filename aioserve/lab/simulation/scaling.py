"""How many replicas of a simulated fleet there are: asks the autoscaler, and knows who starts.

Knows numbers of seats. Knows no engine and no router: what is to come and go, the fleet is told.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError, place_of
from aioserve.lab.simulation.choice import Choice, check_choices
from aioserve.routing import (
    AutoscalerInterface,
    FleetView,
    ReplicaView,
    RoutedRequest,
    RouterError,
    blamed,
    load_autoscaler,
)

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
    """How a fleet is scaled: between how many replicas, by which autoscalers in turn."""

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
