"""What an engine answers to commands, and the words in which it is asked: plain data.

Knows neither the commands nor the engine, which makes these.
"""

from pathlib import Path
from typing import Literal

import msgspec

from aioserve.background_writer import dropped_lines

Running = Literal["keep", "abort"]  # what becomes of requests that run or wait
Arrivals = Literal["wait", "refuse"]  # and of those that come meanwhile
State = Literal["running", "paused", "asleep"]

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

    `dead`: the engine has ended, for `reason`. `silent`: it does not answer its front end.
    `loading`, `draining`: not yet, no longer. `paused`, `asleep`: an operator wants it so.
    `failing`: the policy did something wrong, and no step has come back since. `stalled`: it
    serves none of the requests that wait. `hanging`: a step takes longer than
    `server.hung_step_seconds`. `ready` with a reason: a plain policy plans in the place of one that
    has failed.
    """

    status: Readiness = "ready"
    reason: str = ""


class Counted(msgspec.Struct, array_like=True):
    """What a process counts, by values of labels: since it began, or now if it is a gauge."""

    name: str  # of the metric, without prefix and `_total`
    documentation: str
    labels: tuple[str, ...]
    counts: list[tuple[tuple[str, ...], int]]
    is_gauge: bool = False


def count_dropped_lines() -> Counted:
    """What this process has dropped of its logs."""
    told = "Lines of logs, and frames of decision logs, dropped since their reader stood still"
    counts: list[tuple[tuple[str, ...], int]] = [
        ((n,), count) for n, count in dropped_lines.items()
    ]
    return Counted("log_lines_dropped", told, ("log",), counts)


class Seen(msgspec.Struct, frozen=True):
    """What a watcher of the scheduler gets, as `engine.observe.frames` has it, in JSON."""

    number: int  # of the last frame: to be asked for what comes after it
    frames: list[bytes]


class Report(msgspec.Struct, frozen=True):
    """What came of a trial of another policy."""

    report_id: str  # to be asked for with `FindReport`
    num_requests: int  # that both policies were given
    num_missing: int  # requests more, and differences would have intervals
    words: str  # the comparison as a table


class AdapterPaths(msgspec.Struct, frozen=True):
    """Adapters that can be asked for, by name, in the order in which they were loaded."""

    paths: dict[str, Path]


class Done(msgspec.Struct):
    """Response where there is nothing to tell."""

    status: Literal["ok"] = "ok"
