"""What befalls the replicas of a fleet while it serves: they die, come back, and become slow.

Plain data, part of a workload. Times in seconds from its start. Knows no fleet.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError

Place = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Duration = Annotated[float, Meta(gt=0)]


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica dies: what it had not streamed goes elsewhere, what it had ends with an error."""

    replica: Place  # from 0
    at: Seconds
    down: Duration | None = None  # seconds until it is back, its cache empty; None: for ever


class Straggler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica's steps take `slowdown` times as long; if it is two at once, times both."""

    replica: Place  # from 0
    slowdown: Duration
    at: Seconds = 0.0
    duration: Duration | None = None  # seconds; None: to the end


class Deploy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rolling restart: replica after replica takes nothing new, ends what it has, restarts with
    an empty cache and serves again before the next one begins.
    """

    at: Seconds
    down: Duration  # seconds from its end until it serves again
    drain: Duration | None = (
        None  # seconds after which it ends although it has requests; None: none
    )
    at_once: Annotated[int, Meta(ge=1)] = 1  # replicas that restart at the same time


class Incidents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All incidents of a workload."""

    failures: tuple[Failure, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    deploys: tuple[Deploy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.failures or self.stragglers or self.deploys)

    def __add__(self, other: "Incidents") -> "Incidents":
        return Incidents(
            failures=self.failures + other.failures,
            stragglers=self.stragglers + other.stragglers,
            deploys=self.deploys + other.deploys,
        )

    def moved(self, start: float, time_scale: float = 1.0) -> "Incidents":
        """Return the incidents as a workload tells them that begins at `start`, at another speed.
        What came before is left out. How long something lasts stays as it is: machines do not know
        of our time.
        """
        return Incidents(
            failures=tuple(
                msgspec.structs.replace(failure, at=(failure.at - start) * time_scale)
                for failure in self.failures
                if failure.at >= start
            ),
            stragglers=tuple(
                msgspec.structs.replace(straggler, at=max(straggler.at - start, 0.0) * time_scale)
                for straggler in self.stragglers
                if straggler.duration is None or straggler.at >= start
            ),
            deploys=tuple(
                msgspec.structs.replace(deploy, at=(deploy.at - start) * time_scale)
                for deploy in self.deploys
                if deploy.at >= start
            ),
        )

    def check(self, num_replicas: int) -> None:
        """Raises `ConfigError` if one befalls a replica that there is not, or one that is down."""
        for kind, befallen in (("failure", self.failures), ("straggler", self.stragglers)):
            for incident in befallen:
                if incident.replica >= num_replicas:
                    raise ConfigError(
                        f"a {kind} of replica {incident.replica}, but there are {num_replicas}: "
                        f"they are counted from 0 to {num_replicas - 1}"
                    )
        for deploy in self.deploys:
            if deploy.at_once >= num_replicas:
                raise ConfigError(
                    f"a deploy restarts {deploy.at_once} replicas at once, and there are "
                    f"{num_replicas}: at least one has to serve meanwhile"
                )
        for failure in self.failures:
            for other in self.failures:
                if other is not failure and other.replica == failure.replica:
                    down = float("inf") if failure.down is None else failure.down
                    if failure.at <= other.at < failure.at + down:
                        raise ConfigError(
                            f"replica {other.replica} dies at {other.at:g} s, but it is down since "
                            f"{failure.at:g} s"
                        )
