"""What an autoscaler is asked, and what its author derives from. The docstrings are the contract.

Says how many replicas there should be. Which of them come and go, and what they cost, is the
fleet's part.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from aioserve.option_struct import convert_options
from aioserve.routing.views import ReplicaView, RoutedRequest


class AutoscalerOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Base of an autoscaler's nested `Options`: typed, validated, unknown names refused."""


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet as an autoscaler sees it. Times are seconds of the autoscaler's clock."""

    replicas: tuple[ReplicaView, ...]  # that serve, with what they report
    num_starting: int  # that have been asked for and do not serve yet
    min_replicas: int
    max_replicas: int
    startup_seconds: float  # from the answer to the time at which a new replica serves
    interval: float  # seconds from one question to the next
    num_arrived: int  # requests that have come since the last question
    num_arrived_tokens: int  # of their prompts

    @property
    def num_replicas(self) -> int:
        """Replicas that serve or start."""
        return len(self.replicas) + self.num_starting


class AutoscalerInterface(ABC):
    """Says how many replicas there should be. Equal calls in equal order give equal answers.

    Called from one event loop, never from a thread. No method waits.
    """

    Options: type[AutoscalerOptions] = AutoscalerOptions
    options: Any

    def __init__(
        self,
        options: dict[str, Any] | None = None,
        *,
        seed: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Raises `ConfigError` for options that the autoscaler does not have."""
        self.options = self.parse_options(options or {})
        #: Seconds of the fleet's clock; the time module would break virtual time.
        self.clock = clock
        #: The one source of chance: the module `random` would break equal answers.
        self.rng = random.Random(f"{seed} autoscaler")
        self._wanted: list[tuple[float, int]] = []  # times and numbers, of the last while

    @abstractmethod
    def decide(self, fleet: FleetView) -> int:
        """Replicas that there should be, those that start included. Kept within the fleet's least
        and most.
        """

    def steady(self, wanted: int, fleet: FleetView, seconds: float) -> int:
        """The number that is wanted; fewer than there are only as far as that would have been
        enough for the last `seconds`. For the end of `decide`.
        """
        now = self.clock()
        kept = [(when, number) for when, number in self._wanted if when >= now - seconds]
        self._wanted = [*kept, (now, wanted)]
        return max(wanted, min(fleet.num_replicas, max(number for _, number in self._wanted)))

    def on_first_token(self, request: RoutedRequest, seconds: float) -> None:  # noqa: B027
        """A first token has come, `seconds` after the request arrived."""

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> AutoscalerOptions:
        """The options as a struct. Raises `ConfigError` that names what is wrong."""
        owner = f"autoscaler {cls.__name__}"
        return convert_options(options, cls.Options, AutoscalerOptions, owner)
