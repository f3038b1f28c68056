"""Measures against values that were computed by hand."""

from array import array
from math import isnan

import numpy as np
import pytest

from aioserve.errors import ConfigError
from aioserve.lab.comparison.measures import RunMeasures, block_numbers, jain_index, quantile
from aioserve.lab.simulation.outcome import RequestOutcome, RunOutcome
from aioserve.lab.slo import Slo
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest

WORKLOAD = Workload(
    "hand-made",
    (
        WorkloadRequest(0.0, (Piece(1, 10),), 3, user="a"),
        WorkloadRequest(1.0, (Piece(2, 20),), 1, user="b"),
        WorkloadRequest(2.0, (Piece(3, 30),), 5, user="b"),
    ),
)


def outcome() -> RunOutcome:
    """a: 3 tokens; b: one token; b again: timed out after two."""
    run = RunOutcome(3)
    rows = [(0.0, [1.0, 1.5, 3.0], "length"), (1.0, [2.0], "length"), (2.0, [4.0, 5.0], "timeout")]
    for result, (arrival, times, reason) in zip(run.requests, rows, strict=True):
        result.arrival, result.finish_reason = arrival, reason
        result.token_times, result.end = array("d", times), times[-1]
    run.requests[0].num_cached_tokens = 4
    run.end, run.num_scheduled_tokens, run.num_preemptions = 5.0, 60, 2
    return run


def measures(slo: str | None = None) -> RunMeasures:
    return RunMeasures(outcome(), WORKLOAD, None if slo is None else Slo.parse(slo))


def test_durations_of_requests() -> None:
    found = measures()
    assert found.ttft.tolist() == [1.0, 1.0, 2.0]
    assert found.tpot[0] == 1.0
    assert isnan(found.tpot[1])  # one token has no time per further token
    assert found.e2e[:2].tolist() == [3.0, 1.0]
    assert isnan(found.e2e[2])  # it never came to its end
    assert found.gaps.tolist() == [0.5, 1.0, 1.5]
    assert found.gap_counts.sum() == 3
    assert found.finish_reasons == {"length": 2, "timeout": 1}


def test_totals_of_a_run() -> None:
    totals = measures("e2e=2").totals
    assert totals["output_tokens_per_second"] == 6 / 5
    assert totals["total_tokens_per_second"] == 66 / 5
    assert totals["prefix_hit_share"] == 4 / 60
    # 10 - 4 + 2 for the first and 20 for the second were needed; 60 were computed.
    assert totals["wasted_tokens"] == 32
    assert totals["preemptions"] == 2
    assert totals["unfinished"] == 1
    assert totals["good_share"] == pytest.approx(1 / 3)
    assert totals["goodput_per_second"] == 1 / 5
    # a: 13 tokens in 3 s; b: 21 + 32 tokens in 4 s.
    assert totals["fairness"] == pytest.approx(jain_index(np.array([13 / 3, 53 / 4])))


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ("ttft=1", [1, 1, 0]),
        ("tpot=0.9", [0, 1, 0]),  # a single token misses no time per token
        ("ttft=5, tpot=5, e2e=2", [0, 1, 0]),
        ("ttft=100", [1, 1, 0]),  # what did not finish is never good
    ],
)
def test_goodput_counts_requests_within_all_limits(slo: str, good: list[int]) -> None:
    assert measures(slo).is_good.tolist() == good


@pytest.mark.parametrize("text", ["", "ttft", "ttft=soon", "tftt=1", "ttft=0"])
def test_a_bad_slo_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLO"):
        Slo.parse(text)


def test_quantiles_are_values_that_occurred() -> None:
    values = np.array([4.0, 1.0, np.nan, 3.0, 2.0])
    assert [quantile(values, q) for q in (0.25, 0.5, 0.51, 1.0)] == [1, 2, 3, 4]
    assert isnan(quantile(np.array([np.nan]), 0.5))


def test_jain_index_is_1_for_equals_and_1_over_n_for_one_who_has_all() -> None:
    assert jain_index(np.array([3.0, 3.0, 3.0])) == pytest.approx(1)
    assert jain_index(np.array([5.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert jain_index(np.array([0.0])) == 1


def test_blocks_are_consecutive_and_nearly_equal() -> None:
    blocks = block_numbers(407)
    assert (np.diff(blocks) >= 0).all()
    sizes = np.bincount(blocks)
    assert (len(sizes), sizes.min(), sizes.max()) == (20, 20, 21)
    assert block_numbers(3).tolist() == [0, 0, 0]


def test_a_request_without_tokens_has_no_durations() -> None:
    run = RunOutcome(1)
    run.requests[0] = RequestOutcome()
    run.requests[0].finish_reason = "refused"
    found = RunMeasures(run, WORKLOAD.cut(limit=1), None)
    assert isnan(found.ttft[0])
    assert isnan(found.e2e[0])
    assert len(found.gaps) == 0
