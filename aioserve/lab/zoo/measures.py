"""What is measured of a policy on the standard workloads: one number a measure, workload and seed.

Runs policies and takes the lab's measures of each run. Knows nothing of other policies' numbers.
"""

from collections.abc import Sequence

import numpy as np

from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.document import classes_of
from aioserve.lab.comparison.fleet_totals import fleet_totals
from aioserve.lab.comparison.measures import RunMeasures, quantile, statistics_of, tidy
from aioserve.lab.comparison.rows import MEANINGS, ROWS, Row
from aioserve.lab.simulation.clients import Progress
from aioserve.lab.simulation.fleet_outcome import FleetOutcome
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.workloads.workload import Workload
from aioserve.lab.zoo.standard import WORKLOADS, load_workload, prepared

#: By policy, workload and measure: a value for each seed, in the units of the lab's document; NaN
#: where nothing is defined.
Values = list[float]
Scores = dict[str, dict[str, Values]]

#: The measure by which policies are ranked.
IN_TIME = Row("in time, %", "totals", "in_time", "points", 100, 1, 1)
_LABELS = (
    *("TTFT mean, ms", "TTFT p99, ms", "TPOT p99, ms", "gap p99, ms", "end to end mean, ms"),
    *("end to end p99, ms", "program mean, s", "goodput, requests/s", "output tokens/s"),
    *("service apart max", "prefix hits, %", "wasted tokens, %", "preemptions", "busy, %"),
    "unfinished requests",
)
MEASURES = (IN_TIME, *(next(row for row in ROWS if row.label == label) for label in _LABELS))
UNFINISHED = MEASURES[-1]
IN_TIME_MEANING = (
    "The share of the requests, and of the programs of agents, that kept to all limits of their "
    "class; classes count alike, however many requests they have. A request that is rejected or "
    "not finished counts as late. By it policies are ranked."
)
ONE_ENGINE = Fleet(1, "round_robin")  # simulated as the engine is, and quicker


def meaning(row: Row) -> str:
    """What a measure is, in a sentence."""
    if row is IN_TIME:
        return IN_TIME_MEANING
    return next((text for word, text in MEANINGS.items() if row.label.startswith(word)), "")


def key(row: Row) -> str:
    """The name of a measure in files: `ttft.p99`, `in_time`."""
    return row.statistic if row.measure == "totals" else f"{row.measure}.{row.statistic}"


def run_standard(
    candidates: Sequence[Candidate],
    seeds: Sequence[int],
    num_jobs: int = 1,
    progress: Progress = lambda count: None,
    workloads: Sequence[str] = WORKLOADS,
) -> list[Scores]:
    """Run each candidate on the workloads with each seed; its scores, in the same order.

    Raises `PolicyError` when a policy fails, `ConfigError` if a request can never run under it.
    """
    loaded = {(name, seed): load_workload(name, seed) for name in workloads for seed in seeds}
    places = [(i, name, seed) for i in range(len(candidates)) for name, seed in loaded]
    runs = [
        (prepared(candidates[i], loaded[name, seed]).config, loaded[name, seed], ONE_ENGINE)
        for i, name, seed in places
    ]
    found: list[Scores] = [{name: {} for name in workloads} for _ in candidates]
    outcomes = simulate_all(runs, num_jobs, progress)
    for (i, name, seed), outcome in zip(places, outcomes, strict=True):
        for measure, value in measure_run(outcome, loaded[name, seed]).items():
            found[i][name].setdefault(measure, []).append(value)
    return found


def measure_run(outcome: RunOutcome, workload: Workload) -> dict[str, float]:
    """The measures of one run by their `key`."""
    levels = ServiceLevels.of((), classes_of([workload]))
    run = RunMeasures(outcome, workload, levels, workload.weights)
    if isinstance(outcome, FleetOutcome):
        run.totals |= fleet_totals(outcome, ONE_ENGINE, run.totals)
    good = [run.is_good, *([run.program_good] if hasattr(run, "program_good") else [])]
    kinds = np.array([request.kind for request in workload.requests])
    shares = [float(np.nanmean([of[kinds == kind] for of in good])) for kind in workload.classes]
    run.totals["in_time"] = float(np.mean(shares))
    run.totals["goodput_per_second"] = float(np.nansum(good)) / max(outcome.end, 1e-9)
    return {key(row): tidy(_value(run, row)) for row in MEASURES}


def _value(run: RunMeasures, row: Row) -> float:
    if row.measure == "totals":
        return float(run.totals.get(row.statistic, np.nan))
    if row.measure == "gap":
        return quantile(run.gaps, {"p50": 0.5, "p99": 0.99}[row.statistic])
    values = getattr(run, row.measure, np.empty(0))
    return statistics_of(values)[row.statistic]
