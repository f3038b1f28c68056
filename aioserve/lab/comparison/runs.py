"""Runs of configurations on workloads, and how two of them differ in one measure.

The part of a comparison that a curve or a search needs. Knows nothing about how it is shown.
"""

from collections.abc import Iterator, Sequence

import msgspec

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.comparison.bootstrap import Difference
from aioserve.lab.comparison.document import differences, sampling_of, summarize
from aioserve.lab.comparison.measures import RunMeasures
from aioserve.lab.comparison.rows import Row, key, signed, value_of, verdict
from aioserve.lab.simulation.clients import Progress
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.workloads.workload import Workload


class Apart(msgspec.Struct, frozen=True):
    """How far a value is from another one, in the unit of its row, with the 95% interval; None: it
    has none.
    """

    value: float
    low: float | None
    high: float | None
    verdict: str  # `better`, `worse`, or why it is neither

    def in_words(self, row: Row) -> str:
        """The difference and its interval, with the digits of the row."""
        if self.low is None or self.high is None:
            return signed(self.value, row)
        ends = f"{signed(self.low, row)} .. {signed(self.high, row)}"
        return f"{signed(self.value, row)} ({ends})"


def apart(difference: Difference, row: Row, first: float) -> Apart:
    """A difference from the value `first`, which is in the unit of the row."""
    low, high = (
        None if end is None else end * row.factor for end in (difference.low, difference.high)
    )
    said = {
        **msgspec.to_builtins(difference),
        "is_distinguishable": difference.is_distinguishable,
        "is_nothing": difference.is_nothing,
    }
    return Apart(difference.value * row.factor, low, high, verdict(said, row, first))


def measure_runs(
    runs: Sequence[tuple[EngineConfig, Workload]],
    slo: ServiceLevels | None,
    num_jobs: int,
    progress: Progress,
) -> Iterator[RunMeasures]:
    """Simulate each configuration on its workload; the measures, in the order of `runs`."""
    outcomes = simulate_all([(config, load, None) for config, load in runs], num_jobs, progress)
    for outcome, (_, workload) in zip(outcomes, runs, strict=True):
        yield RunMeasures(outcome, workload, slo, workload.weights or None)


def mean_of(runs: Sequence[RunMeasures], row: Row) -> float:
    """The mean over seeds, in the unit of the row. Raises `ConfigError` where it is undefined."""
    value = value_of(summarize(list(runs)), row)
    if value != value:  # NaN
        raise ConfigError(f"{key(row)} is not defined on this workload: no request has it")
    return value


def apart_in(first: Sequence[RunMeasures], second: Sequence[RunMeasures], row: Row) -> Apart:
    """The second less the first in one measure; the runs are of the same seeds, in pairs."""
    a, b = list(first), list(second)
    found = differences(a, b, sampling_of(a, b, is_live=False))[row.measure][row.statistic]
    ends = {name: found[name] for name in ("value", "low", "high", "low_ratio", "high_ratio")}
    return apart(Difference(**ends), row, mean_of(first, row))
