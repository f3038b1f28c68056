"""Policies over the error of predictions, beside themselves and a baseline without any.

Runs every policy on the same requests: with predictions of each error, and without. Knows nothing
about how curves are shown.
"""

from collections.abc import Sequence

import msgspec

from aioserve.lab.comparison.candidates import Candidate, prepare
from aioserve.lab.comparison.document import classes_of
from aioserve.lab.comparison.measures import tidy
from aioserve.lab.comparison.rows import Row, key
from aioserve.lab.comparison.runs import Apart, apart_in, mean_of, measure_runs
from aioserve.lab.mispredict.errors import Errors
from aioserve.lab.simulation.clients import Progress
from aioserve.lab.slo import ServiceLevels, StatedSlo
from aioserve.lab.workloads.predictions import with_predictions, without_predictions
from aioserve.lab.workloads.workload import Workload


class Point(msgspec.Struct, frozen=True):
    """One policy with predictions of one error; the value is in the unit of the measure's row."""

    error: float
    value: float
    against_baseline: Apart
    against_blind: Apart  # the same policy without predictions


class Curve(msgspec.Struct, frozen=True):
    """One policy, from good predictions to bad ones, and without any."""

    policy: str
    blind: float
    blind_against_baseline: Apart
    points: list[Point]


class Curves(msgspec.Struct, frozen=True):
    """Several policies on one workload; plain data."""

    workload: str
    num_requests: int  # of the first seed, in `seconds`
    seconds: float
    seeds: list[int]
    measure: str  # as `parse_measure` reads it
    kind: str  # of the errors
    baseline: str  # a policy that gets no predictions
    baseline_value: float
    curves: list[Curve]


def measure_curves(
    candidates: Sequence[Candidate],
    baseline: Candidate,
    workloads: Sequence[Workload],
    errors: Errors,
    row: Row,
    *,
    slo: Sequence[StatedSlo] = (),
    clip: bool = False,
    num_jobs: int = 1,
    progress: Progress = lambda count: None,
) -> Curves:
    """Run each candidate with predictions of each error and without, and the baseline without.
    `workloads` are one for each seed. Raises `ConfigError` for a measure that no request has.
    """
    ready, told, _ = prepare([baseline, *candidates], list(workloads), is_live=False, clip=clip)
    blind = [without_predictions(workload) for workload in told]
    by_error = [
        [with_predictions(w, prediction) for w in told] for prediction in errors.predictions
    ]
    runs = [(ready[0].config, workload) for workload in blind]
    for candidate in ready[1:]:
        runs += [(candidate.config, w) for loads in (blind, *by_error) for w in loads]
    levels = ServiceLevels.of(slo, classes_of(told))
    measured = list(measure_runs(runs, levels, num_jobs, progress))
    groups = [measured[i : i + len(told)] for i in range(0, len(measured), len(told))]
    base, others = groups[0], groups[1:]
    baseline_value = mean_of(base, row)
    curves = []
    for i, candidate in enumerate(candidates):
        alone, *with_errors = others[i * (1 + len(by_error)) : (i + 1) * (1 + len(by_error))]
        points = [
            Point(
                error, mean_of(group, row), apart_in(base, group, row), apart_in(alone, group, row)
            )
            for error, group in zip(errors.sizes, with_errors, strict=True)
        ]
        against = apart_in(base, alone, row)
        curves.append(Curve(candidate.name, mean_of(alone, row), against, points))
    first = workloads[0]
    return Curves(
        first.name,
        len(first.requests),
        tidy(first.duration),
        [workload.seed for workload in workloads],
        key(row),
        errors.kind,
        baseline.name,
        baseline_value,
        curves,
    )
