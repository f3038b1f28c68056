"""What routers and autoscalers are asked, and what their authors derive from: the contract.

The seam between senders of requests, live or simulated, and the choice of a replica. A router
holds no connection and waits for nothing. It may answer a refusal, a wait, two replicas or a
migration in place of a replica. A class is found by name, by `package.module:Class`, or by
`file.py`; those that ship are lines of `BRINGS` in the package above.
"""

import math
import random
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from aioserve.errors import FROM_OUTSIDE, AioserveError, ConfigError, PolicyError
from aioserve.fleet import available_autoscalers, available_routers
from aioserve.fleet.routing.views import ROLES, Prefixes, Programs, ReplicaView, RoutedRequest
from aioserve.support.plugins import Kind, convert_options


class RouterError(PolicyError):
    """A router raised, or answered what is no answer; the message names it and the line."""


@contextmanager
def blamed(kind: type, method: str) -> Iterator[None]:
    """Turn what the router or an autoscaler raises in the block into a `RouterError` with its line.
    Errors of ours pass.
    """
    try:
        yield
    except (AioserveError, *FROM_OUTSIDE):
        raise
    except BaseException as error:
        raise RouterError(
            f"{kind.__name__} raised {error!r} in {method}{_place(error, kind)}"
        ) from error


def _place(error: BaseException, kind: type) -> str:
    """`" (mine.py:12)"`, the innermost line of the class's own files; "" if none was running."""
    files = {
        function.__code__.co_filename
        for base in kind.__mro__
        if not base.__module__.startswith(("aioserve.fleet.routing", "builtins", "abc"))
        for function in vars(base).values()
        if hasattr(function, "__code__")
    }
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def check_roles(roles: Iterable[str]) -> None:
    """Raises `ConfigError` for a role that there is not, or if no replica would do the other half
    of the work.
    """
    found = set(roles)
    for role in found.difference(ROLES):
        raise ConfigError(f"a role is one of {', '.join(map(repr, ROLES))}, got {role!r}")
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if role in found and not found & {"", other}:
            raise ConfigError(f"all replicas have the role {role}: none would {other}")


#: Seconds that a request may wait for its router in all; then it is refused.
MAX_WAIT_SECONDS = 60.0
#: The shortest wait, in seconds: a router that says less is asked again after this.
MIN_WAIT_SECONDS = 0.001


class Refuse(msgspec.Struct, frozen=True):
    """The request is turned away: over HTTP by 429 with this reason and `Retry-After`."""

    reason: str
    retry_after: float = 1.0  # seconds

    def __post_init__(self) -> None:
        """Raises `ValueError` for a refusal without a reason, or a time that is none."""
        if not self.reason:
            raise ValueError("Refuse needs a reason, which the client is told; got an empty text")
        if not 0 <= self.retry_after < math.inf:
            raise ValueError(
                f"Refuse: retry_after is a finite number of at least 0, got {self.retry_after!r}"
            )


class Wait(msgspec.Struct, frozen=True):
    """The request stays with the sender, which asks again after `seconds`; in all it waits at most
    `MAX_WAIT_SECONDS`. Its deadline ends it meanwhile.
    """

    seconds: float

    def __post_init__(self) -> None:
        """Raises `ValueError` for a time that is not above 0, or above the bound."""
        if not 0 < self.seconds <= MAX_WAIT_SECONDS:
            raise ValueError(
                f"Wait takes seconds above 0 and up to {MAX_WAIT_SECONDS:g}, got {self.seconds!r}"
            )


class Hold(msgspec.Struct, frozen=True):
    """The request stays with the sender, in a line: whenever a request has begun or ended at a
    replica, or a replica has come, those in line are asked about again, in the order of `order`,
    until one of them is held again. For a router that states `holds = True`. In all it waits at
    most `MAX_WAIT_SECONDS`, and its deadline ends it meanwhile.
    """


class Split(msgspec.Struct, frozen=True):
    """The prompt is computed by `prefill` and the reply is made by `decode`, to which KV blocks are
    handed over behind the first token. For a router that states `splits = True`.
    """

    prefill: ReplicaView
    decode: ReplicaView


class Migrate(msgspec.Struct, frozen=True):
    """A running request moves to another replica with its KV blocks, while it decodes. An answer of
    `rebalance`, for a router that states `rebalance_seconds`. A request that has ended meanwhile
    stays ended, and one for which `to` has no room stays where it is.
    """

    request_id: str
    to: ReplicaView


#: One of the replicas that were shown, a refusal, a wait for a time, a place in line, or two
#: replicas that share the request.
Answer: TypeAlias = ReplicaView | Refuse | Wait | Hold | Split
Replicas: TypeAlias = tuple[ReplicaView, ...]


PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class RouterOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Base of a router's nested `Options`: typed, validated, unknown names refused."""


class RouterInterface(ABC):
    """The interface of a router, which chooses a replica for each request. Equal calls in equal
    order give equal answers.

    Called from one event loop, never from a thread. No method waits.
    """

    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        """Return one of `replicas`, which are at least one and in the same order each time; or
        `Refuse`, `Wait`, `Hold` or `Split`. A request that waited is asked about again, and so is
        one whose replica has died before its first token: that replica is not among those that are
        shown.
        """

    def order(self, request: RoutedRequest) -> Any:
        """Return the sort key of a request that is held: the smallest is asked about first. Asked
        for each of them whenever they are asked about again. By default the order of arrival.
        """
        return request.arrival_time

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
    """The base class of routers: options, a clock, a die and the cached prefixes."""

    #: Whether `prefixes` is to be filled, from what the KV caches say, and `block_hashes` with it.
    uses_prefixes: ClassVar[bool] = False
    #: Whether `ReplicaView` is to hold what replicas report: `num_running` and all after it.
    uses_reports: ClassVar[bool] = False

    #: Whether `programs` is to be filled, and `RoutedRequest.turn` with it.
    uses_programs: ClassVar[bool] = False

    #: A promise, which the contract checks: a session stays at its replica while that lives.
    keeps_sessions: ClassVar[bool] = False

    #: Whether it answers `Hold`. Refused at the start where senders keep no line of requests.
    holds: ClassVar[bool] = False
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
        programs: Programs | None = None,
    ) -> None:
        """Raises `ConfigError` for options that the router does not have."""
        self.options = self.parse_options(options or {})
        #: Seconds of the sender's clock; the time module would break virtual time.
        self.clock = clock
        #: The one source of chance: the module `random` would break equal answers.
        self.rng = random.Random(f"{seed} router")
        #: Which replica holds how much of a prompt, if the router `uses_prefixes`.
        self.prefixes = prefixes or Prefixes()
        #: What was sent of each program, if the router `uses_programs`.
        self.programs = programs or Programs()

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> RouterOptions:
        """Return the options as a struct. Raises `ConfigError` that names what is wrong."""
        return convert_options(options, cls.Options, RouterOptions, f"router {cls.__name__}")

    @classmethod
    def moves(cls) -> bool:
        """Return whether requests may move from one replica to another."""
        return cls.splits or cls.rebalance_seconds is not None

    @classmethod
    def check_holds(cls) -> None:
        """Raises `ConfigError` if the router holds requests in a line, for a sender without one."""
        if cls.holds:
            raise ConfigError(
                f"router {cls.__name__} answers Hold: a line of requests that a router orders is "
                "kept in comparisons alone"
            )

    @classmethod
    def check_moves(cls, what_is_missing: str) -> None:
        """Raises `ConfigError` if the router moves requests, for a sender that hands no KV blocks
        over: `what_is_missing` says why, and what to do.
        """
        if cls.moves():
            how = "answers Split" if cls.splits else "answers Migrate"
            raise ConfigError(f"router {cls.__name__} {how}: {what_is_missing}")


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
        """How many replicas serve or start."""
        return len(self.replicas) + self.num_starting


class AutoscalerInterface(ABC):
    """The interface of an autoscaler, which says how many replicas there should be. Equal calls in
    equal order give equal answers.

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
        """Return the number that is wanted; fewer than there are only as far as that would have
        been enough for the last `seconds`. For the end of `decide`.
        """
        now = self.clock()
        kept = [(when, number) for when, number in self._wanted if when >= now - seconds]
        self._wanted = [*kept, (now, wanted)]
        return max(wanted, min(fleet.num_replicas, max(number for _, number in self._wanted)))

    def on_first_token(self, request: RoutedRequest, seconds: float) -> None:  # noqa: B027
        """A first token has come, `seconds` after the request arrived."""

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> AutoscalerOptions:
        """Return the options as a struct. Raises `ConfigError` that names what is wrong."""
        owner = f"autoscaler {cls.__name__}"
        return convert_options(options, cls.Options, AutoscalerOptions, owner)


_ROUTER = Kind(
    word="router",
    words="routers",
    interface=BaseRouter,  # type: ignore[type-abstract]
    base="BaseRouter",
    available=available_routers,
)


def load_router(spec: str) -> type[BaseRouter]:
    """Return the router class that `spec` names; a file is read anew each time. No class: the only
    one.

    Raises `ConfigError` that lists what there is, or says by file and line why it cannot be
    imported.
    """
    return _ROUTER.load(spec)


_AUTOSCALER = Kind(
    word="autoscaler",
    words="autoscalers",
    interface=AutoscalerInterface,  # type: ignore[type-abstract]
    base="AutoscalerInterface",
    available=available_autoscalers,
)


def load_autoscaler(spec: str) -> type[AutoscalerInterface]:
    """Return the autoscaler class that `spec` names, as `load_router` finds a router."""
    return _AUTOSCALER.load(spec)


def short_name(spec: str) -> str:
    """Return the name of a router or autoscaler, or the class or file that `spec` names, for
    tables.
    """
    if ":" in spec:
        return spec.rpartition(":")[2]
    return Path(spec).stem if spec.endswith(".py") else spec
