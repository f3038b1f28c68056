"""Completion times of programs, against numbers that were computed by hand."""

from typing import Any

import numpy as np
import pytest

from aioserve.config import EngineConfig, RunnerConfig
from aioserve.lab.comparison.measures import RunMeasures, completion_times, one_by_one, slowdowns
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import simulate
from aioserve.lab.slo import ServiceLevels, Slo
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest

CONFIG = EngineConfig(runner=RunnerConfig(runner="simulated"))


def part(arrival: float, program: int, *waits_for: int, **fields: Any) -> WorkloadRequest:
    follows, after = (waits_for[0], waits_for[1:]) if waits_for else (-1, ())
    text = Piece(7, 200)  # the same for all: a cache would hold it
    return WorkloadRequest(
        arrival, (text,), 20, follows=follows, after=after, program=program, **fields
    )


def workload() -> Workload:
    """Two programs that fan out and join, and a request of none."""
    return Workload(
        "hand-made",
        (
            part(1.0, 0, kind="agent"),
            part(0.3, 0, 0),
            part(0.3, 0, 0),
            part(2.0, -1),
            part(0.1, 0, 1, 2),
            part(1.0, 5, kind="agent"),
            part(0.5, 5, 5),
        ),
    )


def outcome() -> RunOutcome:
    run = RunOutcome(7)
    times = [(1.0, 2.0), (2.3, 3.0), (2.3, 4.0), (2.0, 9.0), (4.1, 6.0), (1.0, 2.0), (2.5, 3.0)]
    for result, (arrival, end) in zip(run.requests, times, strict=True):
        result.arrival, result.end, result.finish_reason = arrival, end, "stop"
    return run


def test_a_program_takes_from_its_first_arrival_to_its_last_end() -> None:
    found = completion_times(outcome(), workload())
    assert [found[0], found[5]] == [5.0, 2.0]
    assert np.isnan(found[[1, 2, 3, 4, 6]]).all()


def test_a_program_that_failed_is_late_and_one_that_was_left_is_not_counted() -> None:
    run, levels = outcome(), ServiceLevels(None, {"agent": Slo(program=4.0)})
    measures = RunMeasures(run, workload(), levels)
    assert measures.program_good[[0, 5]].tolist() == [0, 1]
    assert measures.totals["programs_in_time"] == 0.5
    assert "good_share" not in measures.totals  # the SLO says nothing of single requests
    assert "worst_class_share" not in measures.totals  # a single class has an SLO
    both = ServiceLevels(by_class={**levels.by_class, "": Slo(e2e=60)})  # all others make it
    assert RunMeasures(run, workload(), both).totals["worst_class_share"] == 0.5
    run.requests[6].finish_reason = "timeout"
    assert RunMeasures(run, workload(), levels).totals["programs_in_time"] == 0
    left = Workload("left", (part(0.0, 0, kind="agent", aborts=True), part(1.0, 1, kind="agent")))
    run = RunOutcome(2)
    for result in run.requests:
        result.finish_reason = "stop"
    assert np.isnan(RunMeasures(run, left, levels).program_good[0])


def test_alone_each_program_meets_an_empty_engine_and_keeps_its_pauses() -> None:
    alone = one_by_one(workload())
    assert len(alone.requests) == 6
    assert [r.waits_for for r in alone.requests] == [(), (0,), (0,), (1, 2), (0, 1, 2, 3), (4,)]
    found = simulate(CONFIG, alone)
    assert all(result.num_cached_tokens == 0 for result in (found.requests[0], found.requests[4]))
    assert found.requests[5].arrival - found.requests[4].end == pytest.approx(0.5)


def test_a_program_that_has_the_engine_for_itself_is_not_slowed_down() -> None:
    whole = workload()
    single = whole.cut(limit=3)
    run, alone = simulate(CONFIG, single), simulate(CONFIG, one_by_one(single))
    ratio = slowdowns(completion_times(run, single), single, alone)
    assert ratio[0] == pytest.approx(1)
    run, alone = simulate(CONFIG, whole), simulate(CONFIG, one_by_one(whole))
    ratio = slowdowns(completion_times(run, whole), whole, alone)
    assert (ratio[[0, 5]] > 1).any()
