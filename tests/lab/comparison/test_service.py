"""Rates and shares of service, against numbers that were computed by hand."""

from array import array

import numpy as np
import pytest

from aioserve.lab.comparison.measures import RunMeasures
from aioserve.lab.comparison.service import jain_index, service_by_client
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest


def run(
    *rows: tuple[str, float, float | None, list[float]], steps: int = 100
) -> tuple[RunOutcome, Workload]:
    """A step every second; prompts of 10 tokens. Rows: user, arrival, admission, token times."""
    requests = [
        WorkloadRequest(a, (Piece(i, 10),), 5, user=u) for i, (u, a, _, _) in enumerate(rows)
    ]
    outcome = RunOutcome(len(rows))
    for result, (_, arrival, admitted, times) in zip(outcome.requests, rows, strict=True):
        result.arrival, result.admitted = arrival, admitted
        result.token_times, result.end = array("d", times), times[-1] if times else 99.0
        result.finish_reason = "length"
    outcome.steps.planned = array("d", range(steps))
    outcome.end = 99.0
    return outcome, Workload("hand-made", tuple(requests))


def test_rates_count_the_time_of_every_request() -> None:
    outcome, workload = run(
        ("a", 0.0, 0.0, [2.0, 4.0]), ("a", 0.0, 0.0, [4.0]), ("b", 1.0, None, [])
    )
    found = service_by_client(outcome, workload, {})
    assert found["a"].tokens == 12 + 11
    assert found["a"].rate == pytest.approx(23 / 8)  # two at once count twice
    assert found["b"].rate == 0


def test_who_is_admitted_by_the_first_step_competes_for_nothing() -> None:
    outcome, workload = run(("a", 0.5, 1.0, [2.0]), ("b", 0.7, 1.0, [2.0]), ("b", 0.0, 9.0, [10.0]))
    found = service_by_client(outcome, workload, {})
    assert found["a"][2:] == (0, 0, 0)  # it waited 0.5 s for a step, which left out b alone
    assert found["b"][2:] == (0, 0, 0)


def test_shares_are_of_what_those_who_were_left_out_got_meanwhile() -> None:
    # From second 1 on both have somebody waiting, until b's second request is admitted at 5.
    outcome, workload = run(
        ("a", 0.0, 0.0, [1.0, 2.0, 3.0, 4.0]),
        ("a", 0.5, 3.0, [4.0]),
        ("a", 0.5, 7.0, [8.0]),
        ("b", 0.5, 5.0, [6.0]),
        ("c", 2.2, 3.0, [4.0, 5.0]),  # admitted at once: it gets tokens, and competes with nobody
    )
    found = service_by_client(outcome, workload, {"a": 3.0})
    assert found["a"].competing == found["b"].competing == 4.0  # seconds 1 to 5
    # a: tokens at 2, 3, 4 and 4, and the prompt that was admitted at 3; b: its prompt, at 5.
    assert found["a"].got == 3 + 1 + 10
    assert found["b"].got == 10
    assert found["a"].due == pytest.approx(24 * 3 / 4)
    assert found["b"].due == pytest.approx(24 * 1 / 4)
    assert found["c"][2:] == (0, 0, 0)


def test_an_intended_3_to_1_is_fair_by_weight_and_not_as_it_is() -> None:
    outcome, workload = run(("a", 0.0, 0.0, [1.0] * 20), ("b", 0.0, 0.0, [3.0] * 20))
    totals = RunMeasures(outcome, workload, None, {"a": 3.0, "b": 1.0}).totals
    assert totals["fairness"] == pytest.approx(jain_index(np.array([3.0, 1.0])))
    assert totals["fairness_by_weight"] == pytest.approx(1)
    assert "fairness_by_weight" not in RunMeasures(outcome, workload, None).totals
