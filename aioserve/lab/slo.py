"""What a request must not exceed to count as good: the limits behind goodput, by class of clients.

Knows how limits are written, and which requests they hold for. Measures nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.lab.terminal import say

Limit = Annotated[float, Meta(gt=0)]
Floats = npt.NDArray[np.float64]

# Numbers without a unit that are probably milliseconds, from here on: a limit of 100 s for the
# first token is not usual, while a whole reply may take hours. A guess.
MILLISECONDS_FROM = {"ttft": 100.0, "tpot": 5.0, "gap": 20.0, "e2e": 10_000.0}


def parse_seconds(text: str) -> float:
    """Return the seconds in `0.5`, `0.5s` or `500ms`. Raises `ValueError` for anything else, and
    for what is not above 0 or has no end.
    """
    number = text.strip()
    try:
        if number.endswith("ms"):
            seconds = float(number.removesuffix("ms")) / 1000.0
        else:
            seconds = float(number.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected a time above 0 such as 0.5, 0.5s or 500ms, got {text!r}")
    return seconds


def warn_of_milliseconds(stated: str, name: str, text: str) -> None:
    """Warn on stderr if a limit on `name` has no unit and is at least `MILLISECONDS_FROM` seconds,
    so that milliseconds were probably meant. `stated` is the whole argument: `--slo ttft=500`.
    """
    if text.strip()[-1:] == "s":  # it says its unit
        return
    seconds = parse_seconds(text)
    if seconds >= MILLISECONDS_FROM.get(name, math.inf):
        say(
            f"aioserve: warning: {stated} is {seconds:g} seconds: write {text}ms for "
            f"milliseconds, or {text}s if seconds are meant"
        )


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a request that counts as good, in seconds; None: any."""

    ttft: Limit | None = None
    tpot: Limit | None = None
    gap: Limit | None = None  # of the largest gap between two tokens of the request
    e2e: Limit | None = None
    program: Limit | None = None  # of a whole program, from its first arrival to its last token
    deadline: bool = False  # it ends within its own timeout, if it states one

    def __post_init__(self) -> None:
        """Raises `ValueError` if there is no limit."""
        if not any(msgspec.structs.astuple(self)):
            names = ", ".join(self.__struct_fields__)
            raise ValueError(f"expected at least one limit of {names}")

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse limits in seconds: `ttft=0.5,gap=200ms`, or `deadline`. Warns on stderr of a limit
        that must have been meant in milliseconds. Raises `ConfigError`.
        """
        parts = [part.strip() for part in text.split(",") if part.strip()]
        pairs = {name.strip(): value for name, _, value in (p.partition("=") for p in parts)}
        limits: dict[str, float | bool] = {}
        try:
            if without := [part for part in parts if "=" not in part and part != "deadline"]:
                raise ValueError(f"{without[0]} has no value")
            for name, value in pairs.items():
                if name == "deadline":
                    limits[name] = msgspec.convert(value or True, bool, strict=False)
                elif name in cls.__struct_fields__:
                    limits[name] = parse_seconds(value)
                    warn_of_milliseconds(f"--slo {name}={value}", name, value)
                else:
                    raise ValueError(f"there is no limit {name!r}")
            return cls(**limits)  # type: ignore[arg-type]
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(
                "an SLO looks like ttft=0.5,tpot=50ms,gap=0.2,e2e=10,program=60 (seconds unless "
                f"they say ms, above 0) or deadline, got {text!r}: {error}"
            ) from error

    def is_met(self, durations: Mapping[str, Floats]) -> npt.NDArray[np.bool_]:
        """Return whether each request keeps to the limits, from its seconds by name; `overtime` are
        those beyond its timeout. What is undefined, such as the time per token of a reply of one,
        misses no limit.
        """
        met: npt.NDArray[np.bool_] = np.full(len(durations["e2e"]), True)
        for name in ("ttft", "tpot", "gap", "e2e"):
            limit = getattr(self, name)
            if limit is not None:
                met &= ~(durations[name] > limit)
        if self.deadline:
            met &= ~(durations["overtime"] > 0)
        return met

    @property
    def is_of_requests(self) -> bool:
        """Whether the SLO limits single requests, not only programs."""
        return any((self.ttft, self.tpot, self.gap, self.e2e, self.deadline))

    def __str__(self) -> str:
        """Return the limits in words: `TTFT within 0.5 s and deadline kept`."""
        labels = {"ttft": "TTFT", "tpot": "TPOT", "gap": "largest gap", "e2e": "end to end"}
        labels["program"] = "programs"
        limits = [
            f"{label} within {limit:g} s"
            for name, label in labels.items()
            if (limit := getattr(self, name)) is not None
        ]
        return " and ".join([*limits, *(["deadline kept"] if self.deadline else [])])


class StatedSlo(NamedTuple):
    """One `--slo` of the command: for the requests of one class, or for all (None)."""

    kind: str | None
    slo: Slo

    @classmethod
    def parse(cls, text: str) -> "StatedSlo":
        """Parse `ttft=0.5` or `chat:ttft=0.5`. Raises `ConfigError`."""
        kind, colon, limits = text.rpartition(":")
        return cls(kind if colon else None, Slo.parse(limits))


class ServiceLevels(msgspec.Struct, frozen=True):
    """The limits of each request: those of its class, else those of all; perhaps none."""

    for_all: Slo | None = None
    by_class: dict[str, Slo] = {}

    @classmethod
    def of(
        cls, stated: Sequence[StatedSlo], classes: Mapping[str, Slo | None]
    ) -> "ServiceLevels | None":
        """Return the limits `stated` on the command line and by the workload, whose `classes` are
        given with what it states itself. A class of the command goes before what the command states
        for all, and that before the workload. None if no limit is stated. Raises `ConfigError` for
        a class that the workload does not have, or two statements for one.
        """
        for_all: Slo | None = None
        of_command: dict[str, Slo] = {}
        known = sorted(filter(None, classes))
        for kind, slo in stated:
            if kind is None and for_all is None:
                for_all = slo
            elif kind is None:
                raise ConfigError("--slo without a class is given twice: name a class in one")
            elif kind not in known:
                has = f"it has {', '.join(known)}" if known else "it has no classes"
                raise ConfigError(f"--slo {kind}:...: the workload has no class {kind!r}; {has}")
            elif kind in of_command:
                raise ConfigError(f"--slo {kind}:... is given twice")
            else:
                of_command[kind] = slo
        own = {kind: slo for kind, slo in classes.items() if slo is not None}
        if for_all is not None:
            own = {}
        if for_all is None and not own and not of_command:
            return None
        return cls(for_all, dict(sorted((own | of_command).items())))

    def of_class(self, kind: str) -> Slo | None:
        """Return the limits of requests of a class."""
        return self.by_class.get(kind, self.for_all)

    def judge(self, kinds: Sequence[str], durations: Mapping[str, Floats]) -> Floats:
        """Return a number for each request: 1 if it is within its limits and 0 if not; NaN where it
        has none. `kinds` are the classes of the requests, `durations` their seconds by name.
        """
        good = np.full(len(kinds), np.nan)
        of = np.array(kinds)
        for kind in sorted(set(kinds)):
            slo = self.of_class(kind)
            if slo is not None and slo.is_of_requests:
                is_own = of == kind
                own = {name: values[is_own] for name, values in durations.items()}
                good[is_own] = slo.is_met(own)
        return good

    def __str__(self) -> str:
        """Return the limits of all and of each class, in words."""
        said = [f"{kind}: {slo}" for kind, slo in self.by_class.items()]
        if self.for_all is not None:
            said.insert(0, f"all others: {self.for_all}" if said else str(self.for_all))
        return "; ".join(said)
