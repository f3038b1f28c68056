"""By what options are chosen: a measure at the workload's rate, or the highest rate within an SLO.

Runs configurations. Knows nothing of parts and of choices.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import fmean

from aioserve.errors import ConfigError
from aioserve.lab.comparison.bootstrap import Sampling, compare_seeds
from aioserve.lab.comparison.candidates import Candidate, prepare
from aioserve.lab.comparison.document import classes_of
from aioserve.lab.comparison.knee import Knee
from aioserve.lab.comparison.measures import RunMeasures
from aioserve.lab.comparison.rows import Row
from aioserve.lab.comparison.runs import Apart, apart, apart_in, mean_of, measure_runs
from aioserve.lab.simulation.clients import Progress
from aioserve.lab.slo import ServiceLevels, StatedSlo
from aioserve.lab.workloads.workload import Workload

#: The highest rate at which the SLO is met; not a row of comparisons.
RATE = Row("requests/s within the SLO", "totals", "rate", "requests/s", 1, 3, 1)
FindKnee = Callable[[Candidate, Sequence[Workload]], Knee]


class Scores(ABC):
    """Candidates measured on one part: a score each, and how two of them are apart."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.values: list[float] = []  # of each candidate, in the unit of the row

    @abstractmethod
    def apart(self, first: int, second: int) -> Apart:
        """The score of the second candidate less that of the first."""


class MeasureScores(Scores):
    """By a measure of `compare`."""

    def __init__(self, row: Row, runs: Sequence[Sequence[RunMeasures]]) -> None:
        super().__init__(row)
        self._runs = runs
        self.values = [mean_of(of_candidate, row) for of_candidate in runs]

    def apart(self, first: int, second: int) -> Apart:
        return apart_in(self._runs[first], self._runs[second], self.row)


class RateScores(Scores):
    """By the highest rate that each seed allows."""

    def __init__(self, rates: Sequence[Sequence[float]]) -> None:
        super().__init__(RATE)
        self._rates = rates
        self.values = [fmean(of_candidate) for of_candidate in rates]

    def apart(self, first: int, second: int) -> Apart:
        found = compare_seeds(self._rates[first], self._rates[second], Sampling())
        return apart(found, self.row, self.values[first])


def score_by_measure(
    row: Row,
    candidates: Sequence[Candidate],
    workloads: Sequence[Workload],
    slo: Sequence[StatedSlo],
    num_jobs: int,
    progress: Progress,
    *,
    clip: bool = False,
) -> Scores:
    """Simulate each candidate on each workload. Raises `ConfigError` for an undefined measure."""
    ready, fitting, _ = prepare(list(candidates), list(workloads), is_live=False, clip=clip)
    runs = [(candidate.config, workload) for candidate in ready for workload in fitting]
    levels = ServiceLevels.of(slo, classes_of(fitting))
    measured = list(measure_runs(runs, levels, num_jobs, progress))
    size = len(fitting)
    return MeasureScores(row, [measured[i : i + size] for i in range(0, len(measured), size)])


def score_by_rate(
    find: FindKnee, candidates: Sequence[Candidate], workloads: Sequence[Workload]
) -> Scores:
    """Find the rate of each candidate on each workload alone. Raises `ConfigError` where there is
    no highest rate.
    """
    rates = []
    for candidate in candidates:
        own = []
        for workload in workloads:
            knee = find(candidate, [workload])
            if knee.rate is None:
                name = f"{candidate.name}, seed {workload.seed}"
                raise ConfigError(f"{name}: no highest rate was found: {knee.note}")
            own.append(knee.rate)
        rates.append(own)
    return RateScores(rates)
