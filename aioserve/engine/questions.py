"""What is asked of an engine besides requests, and what it answers: plain data.

The server asks; the engine answers at once, or another process asks it. Knows nothing about either.
"""

from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from aioserve.config import LogLevel

Running = Literal["keep", "abort"]  # what becomes of requests that run or wait
Arrivals = Literal["wait", "refuse"]  # and of those that come meanwhile
State = Literal["running", "paused", "asleep"]

T = TypeVar("T")


class Question(msgspec.Struct, Generic[T], frozen=True, tag=True):
    """One that is answered with a `T`, or with an `AioserveError`."""

    answer_type: ClassVar[Any] = type(None)  # T, for whoever decodes it


#: Of an engine and its server: in the words of `Health`.
Readiness = Literal[
    "ready",
    "loading",
    "draining",
    "paused",
    "asleep",
    "failing",
    "stalled",
    "hanging",
    "silent",
    "dead",
]


class Health(msgspec.Struct, frozen=True):
    """Whether a new request would be served now, and if not, why.

    `dead`: the engine has ended, for `reason`. `silent`: it does not answer whoever asks for us.
    `loading`, `draining`: not yet, no longer. `paused`, `asleep`: an operator wants it so.
    `failing`: the policy did something wrong, and no step has come back since. `stalled`: it
    serves none of those who wait. `hanging`: a step takes longer than `server.hung_step_seconds`.
    `ready` with a reason: a plain policy plans in the place of one that has failed.
    """

    status: Readiness = "ready"
    reason: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether there is something to wait for: nobody need end the process."""
        return self.status not in ("silent", "dead")


class PolicyAndOptions(msgspec.Struct, frozen=True):
    """As they are set."""

    policy: str
    options: dict[str, Any]


class HowAreYou(Question[Health], frozen=True):
    """Answered by an engine that is dead, too."""

    answer_type = Health


class Counted(msgspec.Struct, array_like=True):
    """What somebody has counted since its process began, by values of labels."""

    name: str  # of the metric, without prefix and `_total`
    documentation: str
    labels: tuple[str, ...]
    counts: list[tuple[tuple[str, ...], int]]


class ShowMetrics(Question[bytes], frozen=True):
    """Prometheus' text, of the whole. `counted` is what whoever asks in the engine's process has to
    tell besides; of other processes, it is asked for.
    """

    counted: list[Counted] = []

    answer_type = bytes


class SwitchPolicy(Question[PolicyAndOptions], frozen=True):
    """As `AsyncEngine.switch_policy`; answered with what there was before."""

    policy: str
    options: dict[str, Any]

    answer_type = PolicyAndOptions


class ResetPrefixCache(Question[bool], frozen=True):
    """As `AsyncEngine.reset_prefix_cache`."""

    answer_type = bool


class EngineState(msgspec.Struct, frozen=True):
    """Whether it computes."""

    state: State


class Pause(Question[EngineState], frozen=True):
    """As `AsyncEngine.pause`."""

    running: Running = "keep"
    arrivals: Arrivals = "wait"

    answer_type = EngineState


class Resume(Question[EngineState], frozen=True):
    """As `AsyncEngine.resume`."""

    answer_type = EngineState


class Sleep(Question[EngineState], frozen=True):
    """As `AsyncEngine.sleep`."""

    weights: bool = False
    running: Running = "keep"
    arrivals: Arrivals = "wait"

    answer_type = EngineState


class Wake(Question[EngineState], frozen=True):
    """As `AsyncEngine.wake`."""

    answer_type = EngineState


class Reload(Question[EngineState], frozen=True):
    """As `AsyncEngine.reload`."""

    path: str
    running: Running = "keep"

    answer_type = EngineState


class SetLogLevel(Question[None], frozen=True):
    """Of all processes of the server."""

    level: LogLevel


class SwitchShadow(Question[None], frozen=True):
    """As `AsyncEngine.switch_shadow`."""

    policy: str | None
    options: dict[str, Any]


class LoadAdapter(Question[None], frozen=True):
    """As `Adapters.load`."""

    name: str
    path: str


class UnloadAdapter(Question[None], frozen=True):
    """As `Adapters.unload`."""

    name: str


class AbortElsewhere(Question[bool], frozen=True):
    """Ends a request, or a response of several, of another front end; whether there was one."""

    request_id: str
    reach: str = ""  # whose it must be; "": anybody's

    answer_type = bool


class Seen(msgspec.Struct, frozen=True):
    """What somebody who watches the scheduler gets, as `watch.frames` has it, in JSON."""

    number: int  # of the last frame: to be asked for what comes after it
    frames: list[bytes]


class ShowSteps(Question[Seen], frozen=True):
    """As `Gallery.look`: answered when there is something to see."""

    after: int

    answer_type = Seen


class Report(msgspec.Struct, frozen=True):
    """What came of a trial of another policy."""

    report_id: str  # to be asked for with `FindReport`
    num_requests: int  # that both policies were given
    num_missing: int  # requests more, and differences would have intervals
    words: str  # the comparison as a table


class TryPolicy(Question[Report], frozen=True):
    """As `Trials.try_policy`; answered when the comparison is made."""

    policy: str
    options: dict[str, Any]
    seconds: float | None
    num_requests: int | None = None

    answer_type = Report


class FindReport(Question[bytes | None], frozen=True):
    """As `Trials.find`."""

    report_id: str

    answer_type = bytes | None


class AdapterPaths(msgspec.Struct, frozen=True):
    """Adapters that can be asked for, by name, in the order in which they were loaded."""

    paths: dict[str, Path]
