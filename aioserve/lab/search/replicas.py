"""How many replicas a workload needs within its SLO, under each policy and on each card.

Doubling and bisection over the number of replicas, in virtual time. Prints nothing.
"""

from collections.abc import Callable, Sequence

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.comparison.candidates import Candidate, prepare, watts_of
from aioserve.lab.comparison.knee import Bound, Target, judged
from aioserve.lab.comparison.measures import RunMeasures, joules_of, tidy
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.run import Progress
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.workloads.workload import Workload

HOURS_PER_DAY = 24.0
JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0


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
    bounds: Sequence[Bound] = (),
    target: Target,
    clip: bool = False,
    progress: Progress = lambda count: None,
    on_attempt: Callable[[Attempt], None] = lambda attempt: None,
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
                joules += joules_of(watts, outcome.busy_seconds, outcome.paid_seconds)
        found = judged(runs, fitting, slo, bounds, target)
        attempt = Attempt(fleet.num_replicas, found.good_share, found.is_met, found.bounded)
        attempts.append(attempt)
        on_attempt(attempt)
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
