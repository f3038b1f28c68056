"""What a router is asked, and what its author derives from. The docstrings are the contract.

The seam between senders of requests, live or simulated, and the choice. A router holds no
connection and waits for nothing.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.option_struct import convert_options
from aioserve.routing.answers import Migrate, Refuse, Split, Wait
from aioserve.routing.prefixes import Prefixes
from aioserve.routing.views import ReplicaView, RoutedRequest

#: One of the replicas that were shown, a refusal, a wait, or two replicas that share the request.
Answer: TypeAlias = ReplicaView | Refuse | Wait | Split
Replicas: TypeAlias = tuple[ReplicaView, ...]


PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class RouterOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Base of a router's nested `Options`: typed, validated, unknown names refused."""


class RouterInterface(ABC):
    """Chooses a replica for each request. Equal calls in equal order give equal answers.

    Called from one event loop, never from a thread. No method waits.
    """

    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        """One of `replicas`, which are at least one and in the same order each time; or `Refuse`,
        `Wait` or `Split`. A request that waited is asked about again, and so is one whose replica
        has died before its first token: that replica is not among those that are shown.
        """

    def rebalance(self, replicas: Replicas) -> Sequence[Migrate]:
        """Running requests that are to move to other replicas; asked every `rebalance_seconds`."""
        return ()

    def on_move(self, request: RoutedRequest, source: str, target: str) -> None:  # noqa: B027
        """A running request has moved from one replica to another, by `Split` or `Migrate`; its end
        is told of the target alone.
        """

    def on_join(self, name: str) -> None:  # noqa: B027 - most do not care
        """A replica has come, or has come back with nothing in its memory."""

    def on_leave(self, name: str) -> None:  # noqa: B027 - most know nothing
        """The replica is gone, and its memory with it. Requests that it had end before or after."""

    def on_first_token(self, request: RoutedRequest, name: str, seconds: float) -> None:  # noqa: B027
        """The first token of a request has come from the replica, `seconds` after it was sent."""

    def on_end(self, request: RoutedRequest, name: str) -> None:  # noqa: B027
        """A request that was sent to the replica has ended there, in whatever way."""


class BaseRouter(RouterInterface):
    """What authors of routers derive from: options, a clock, a die and the cached prefixes."""

    #: Whether `prefixes` is to be filled, from what the KV caches say, and `block_hashes` with it.
    uses_prefixes: ClassVar[bool] = False
    #: Whether `ReplicaView` is to hold what replicas report: `num_running` and all after it.
    uses_reports: ClassVar[bool] = False

    #: A promise, which the contract checks: a session stays at its replica while that lives.
    keeps_sessions: ClassVar[bool] = False

    #: Whether it answers `Split`. Refused at the start where blocks cannot be handed over.
    splits: ClassVar[bool] = False
    #: Seconds between two calls of `rebalance`; None: it moves no request. Refused as `splits` is.
    rebalance_seconds: ClassVar[float | None] = None

    Options: type[RouterOptions] = RouterOptions
    options: Any

    def __init__(
        self,
        options: dict[str, Any] | None = None,
        *,
        seed: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        prefixes: Prefixes | None = None,
    ) -> None:
        """Raises `ConfigError` for options that the router does not have."""
        self.options = self.parse_options(options or {})
        #: Seconds of the sender's clock; the time module would break virtual time.
        self.clock = clock
        #: The one source of chance: the module `random` would break equal answers.
        self.rng = random.Random(f"{seed} router")
        #: Which replica holds how much of a prompt, if the router `uses_prefixes`.
        self.prefixes = prefixes or Prefixes()

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> RouterOptions:
        """The options as a struct. Raises `ConfigError` that names what is wrong."""
        return convert_options(options, cls.Options, RouterOptions, f"router {cls.__name__}")

    @classmethod
    def moves(cls) -> bool:
        """Whether requests may move from one replica to another."""
        return cls.splits or cls.rebalance_seconds is not None

    @classmethod
    def check_moves(cls, what_is_missing: str) -> None:
        """Raises `ConfigError` if the router moves requests, for a sender that hands no KV blocks
        over: `what_is_missing` says why, and what to do.
        """
        if cls.moves():
            how = "answers Split" if cls.splits else "answers Migrate"
            raise ConfigError(f"router {cls.__name__} {how}: {what_is_missing}")
