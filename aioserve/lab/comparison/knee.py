"""The knee: the highest rate of requests at which a configuration still meets its SLO.

It may also have to keep bounds on statistics of a whole run, as Sarathi-Serve's capacity does.

Bisection over the time scale of a workload, in virtual time; then, over the number of replicas, how
many a workload needs within its SLO. Prints nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from aioserve.errors import ConfigError
from aioserve.lab.comparison.candidates import Candidate, prepare, watts_of
from aioserve.lab.comparison.measures import (
    PER_REQUEST,
    SECONDS_PER_HOUR,
    STATISTICS,
    RunMeasures,
    joules_of,
    over_seeds,
    tidy,
)
from aioserve.lab.comparison.service import Floats
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.run import Progress, simulate
from aioserve.lab.slo import ServiceLevels, parse_seconds, warn_of_milliseconds
from aioserve.lab.workloads.workload import Workload

MAX_DOUBLINGS = 12  # away from the workload's own rate, before giving up


class Bound(NamedTuple):
    """A statistic of a whole run, and what it may be at most."""

    measure: str
    statistic: str
    limit: float  # seconds

    @classmethod
    def parse(cls, text: str) -> "Bound":
        """Parse a bound such as `gap:p99=0.2` or `gap:p99=200ms`. Warns on stderr of a bound that
        must have been meant in milliseconds. Raises `ConfigError` for anything else.
        """
        name, _, limit = text.partition("=")
        measure, _, statistic = name.partition(":")
        try:
            seconds = parse_seconds(limit)
        except ValueError:
            seconds = 0.0
        measures = (*PER_REQUEST, "gap")
        if measure not in measures or statistic not in STATISTICS or not seconds:
            raise ConfigError(
                "a bound looks like gap:p99=0.2 or gap:p99=200ms (above 0), of "
                f"{', '.join(measures)} and {', '.join(STATISTICS)}; got {text!r}"
            )
        warn_of_milliseconds(f"--bound {text}", measure, limit)
        return cls(measure, statistic, seconds)

    def value(self, runs: Sequence[RunMeasures]) -> float:
        """The mean of the statistic over the runs, in seconds."""
        name = "gaps" if self.measure == "gap" else self.measure
        return over_seeds([getattr(run, name) for run in runs])[self.statistic]


class Target(NamedTuple):
    """The share of requests with an SLO that must be within it: of all, or of every class."""

    share: float = 0.99
    each_class: bool = False


class Judgement(NamedTuple):
    """The verdict on runs with several seeds: whether they keep to a target and to bounds."""

    is_met: bool
    good_share: float | None  # of the requests with an SLO, if any, over all seeds
    worst_class: str | None  # of several with an SLO, that with the lowest share
    worst_class_share: float | None
    bounded: dict[str, float]  # what the bounds are on, such as "gap p99", in seconds


def judged(
    runs: Sequence[RunMeasures],
    workloads: Sequence[Workload],
    slo: ServiceLevels | None,
    bounds: Sequence[Bound],
    target: Target,
) -> Judgement:
    """Judge a run of each workload, which are one workload with several seeds."""
    kinds = np.array([request.kind for workload in workloads for request in workload.requests])
    good = np.concatenate([goods_of(run) for run in runs])
    values = [bound.value(runs) for bound in bounds]
    is_kept = all(v <= bound.limit for v, bound in zip(values, bounds, strict=True))
    shares = {
        kind: float(np.mean(of_class))
        for kind in sorted(set(kinds.tolist()))
        if len(of_class := good[(kinds == kind) & ~np.isnan(good)])
    }
    share = float(np.nanmean(good)) if shares else None
    worst = min(shares, key=lambda kind: shares[kind]) if len(shares) > 1 else None
    lowest = min(shares.values()) if target.each_class and shares else share
    return Judgement(
        is_kept and (lowest is None or lowest >= target.share),
        None if share is None else tidy(share),
        worst,
        None if worst is None else tidy(shares[worst]),
        {f"{b.measure} {b.statistic}": v for b, v in zip(bounds, values, strict=True)},
    )


class Probe(msgspec.Struct, frozen=True):
    """The outcome at one rate that the search has tried."""

    rate: float  # requests or conversations that begin, per second
    time_scale: float  # of the workload
    good_share: float | None  # of the requests with an SLO, if any, over all seeds
    is_met: bool
    worst_class: str | None = None  # of several with an SLO, that with the lowest share
    worst_class_share: float | None = None
    bounded: dict[str, float] = {}  # what the bounds are on, such as "gap p99", in seconds


class Knee(msgspec.Struct, frozen=True):
    """The knee, between `rate`, which met the target, and `rate_above`, which did not. None: see
    `note`.
    """

    rate: float | None
    rate_above: float | None
    target: float
    probes: list[Probe]
    note: str = ""
    each_class: bool = False  # the target holds for each class alone


def search(
    candidate: Candidate,
    workloads: Sequence[Workload],
    slo: ServiceLevels | None,
    *,
    bounds: Sequence[Bound] = (),
    target: float = 0.99,
    each_class: bool = False,
    tolerance: float = 0.02,
    clip: bool = False,
    progress: Progress = lambda count: None,
    on_probe: Callable[[Probe], None] = lambda probe: None,
) -> Knee:
    """Return the knee to within `tolerance` (as a share of the rate). `target` is the share of
    requests that must meet `slo`: of all that have limits, or, with `each_class`, of those of every
    class. All `bounds` must be kept, too. Raises `ConfigError` for a workload without arrivals over
    time, or without limits and bounds.
    """
    (candidate,), fitting, _ = prepare([candidate], list(workloads), is_live=False, clip=clip)
    own_rate = float(np.mean([base_rate(workload) for workload in fitting]))
    probes: list[Probe] = []
    kinds = np.array([request.kind for workload in fitting for request in workload.requests])
    if not bounds and (slo is None or all(slo.of_class(kind) is None for kind in kinds)):
        raise ConfigError(f"{fitting[0].name}: no request has an SLO")

    def is_met(rate: float) -> bool:
        scale = own_rate / rate
        runs = [_measure(candidate, workload.scaled(scale), slo, progress) for workload in fitting]
        found = judged(runs, fitting, slo, bounds, Target(target, each_class))
        probe = Probe(
            tidy(rate),
            tidy(scale),
            found.good_share,
            found.is_met,
            found.worst_class,
            found.worst_class_share,
            found.bounded,
        )
        probes.append(probe)
        on_probe(probe)
        return probe.is_met

    low, high = _bracket(is_met, own_rate)
    if low is not None and high is not None:
        while high > low * (1 + tolerance):
            middle = (low * high) ** 0.5
            if is_met(middle):
                low = middle
            else:
                high = middle
    note = ""
    if low is None:
        note = "not even the lowest rate that was tried is low enough"
    elif high is None:
        note = "even the highest rate that was tried is low enough: the workload is too short"
    return Knee(
        None if low is None else tidy(low),
        None if high is None else tidy(high),
        target,
        probes,
        note,
        each_class,
    )


def _bracket(is_met: Callable[[float], bool], rate: float) -> tuple[float | None, float | None]:
    """Return a rate that meets the target and twice that, which does not; None where there
    is none.
    """
    if is_met(rate):
        for _ in range(MAX_DOUBLINGS):
            if not is_met(2 * rate):
                return rate, 2 * rate
            rate *= 2
        return rate, None
    for _ in range(MAX_DOUBLINGS):
        rate /= 2
        if is_met(rate):
            return rate, 2 * rate
    return None, rate


def base_rate(workload: Workload) -> float:
    """Return the requests, or conversations and programs that begin, per second of a workload.
    Raises `ConfigError` where all arrive at once.
    """
    if workload.duration <= 0:
        raise ConfigError(f"{workload.name}: all requests arrive at once, so there is no rate")
    return sum(r.follows < 0 for r in workload.requests) / workload.duration


def _measure(
    candidate: Candidate, workload: Workload, slo: ServiceLevels | None, progress: Progress
) -> RunMeasures:
    return RunMeasures(simulate(candidate.config, workload, progress), workload, slo)


def goods_of(run: RunMeasures) -> Floats:
    """Return 1 for each request within its limits and 0 for others, NaN where there are none; a
    program with limits counts once, at its first request.
    """
    if "programs_in_time" not in run.totals:
        return run.is_good
    # The first request of a program is good if both are within their limits.
    found: Floats = np.fmin(run.is_good, run.program_good)
    return found


# The fewest replicas: how many a workload needs within its SLO, by doubling and bisection.


HOURS_PER_DAY = 24.0
JOULES_PER_KWH = 3.6e6


class Attempt(msgspec.Struct, frozen=True):
    """A number of replicas that was tried."""

    replicas: int
    good_share: float | None  # of the requests with an SLO, if any, over all seeds
    is_met: bool
    bounded: dict[str, float] = {}  # what the bounds are on, such as "gap p99", in seconds


class Need(msgspec.Struct, frozen=True):
    """The fewest replicas of one candidate; None: the most that were allowed are not enough."""

    name: str
    replicas: int | None
    attempts: list[Attempt]
    price_per_day: float | None = None  # of these replicas, in the currency of their price
    kwh_per_day: float | None = None  # at the power of their machines, where that is known


def fewest_replicas(
    candidate: Candidate,
    workloads: Sequence[Workload],
    slo: ServiceLevels | None,
    most: int,
    *,
    bounds: Sequence[Bound],
    target: Target,
    clip: bool,
    progress: Progress,
) -> Need:
    """Return the fewest replicas, up to `most`, under which the workload keeps to `target`. The
    fleet of the candidate is the unit that is multiplied: groups keep their proportions. Raises
    `ConfigError` for a workload without limits and bounds.
    """
    unit = candidate.fleet
    assert unit is not None
    (candidate,), fitting, _ = prepare([candidate], list(workloads), is_live=False, clip=clip)
    if not bounds and (slo is None or not any(slo.of_class(r.kind) for r in fitting[0].requests)):
        raise ConfigError(f"{fitting[0].name}: no request has an SLO")
    attempts: list[Attempt] = []
    kwh: dict[int, float | None] = {}

    def is_met(units: int) -> bool:
        fleet = multiplied(unit, units)
        runs, joules, seconds = [], 0.0, 0.0
        watts = watts_of(msgspec.structs.replace(candidate, fleet=fleet))
        for workload in fitting:
            outcome = simulate_fleet(candidate.config, workload, fleet, progress)
            runs.append(RunMeasures(outcome, workload, slo))
            seconds += outcome.end
            if watts is not None:
                joules += joules_of(
                    watts, outcome.busy_seconds, outcome.paid_seconds, outcome.saved_seconds
                )
        found = judged(runs, fitting, slo, bounds, target)
        attempts.append(Attempt(fleet.num_replicas, found.good_share, found.is_met, found.bounded))
        a_day = joules / max(seconds, 1e-9) * HOURS_PER_DAY * SECONDS_PER_HOUR / JOULES_PER_KWH
        kwh[units] = None if watts is None else tidy(a_day)
        return found.is_met

    limit = most // unit.num_replicas
    if limit < 1:
        raise ConfigError(
            f"--replicas {most} is fewer than one fleet file has: {unit.num_replicas}"
        )
    low, high = 0, 1
    while not is_met(high):
        if high == limit:
            return Need(candidate.name, None, attempts)
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_met(middle) else (middle, high)
    prices = multiplied(unit, high).prices
    return Need(
        candidate.name,
        high * unit.num_replicas,
        attempts,
        None if prices is None else tidy(HOURS_PER_DAY * sum(prices)),
        kwh[high],
    )


def multiplied(unit: Fleet, number: int) -> Fleet:
    """Return `number` fleets like `unit` behind one router."""
    groups = tuple(
        msgspec.structs.replace(group, replicas=number * group.replicas) for group in unit.groups
    )
    return msgspec.structs.replace(unit, num_replicas=number * unit.num_replicas, groups=groups)
