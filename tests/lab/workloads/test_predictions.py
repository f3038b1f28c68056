"""Predicted lengths are as good as a workload says, and worth what they are."""

import math
import random
from itertools import combinations
from pathlib import Path
from statistics import mean, pstdev

import msgspec
import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.synthetic import (
    AnyPrediction,
    Classes,
    Exact,
    LogNormalError,
    Ranks,
    generate,
    parse_prediction,
    read_spec,
    with_predictions,
    without_predictions,
)
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.request import PREDICTED_OUTPUT_TOKENS
from tests.lab.simulation.test_run import EXACT

SHORTEST_PREDICTED = '''
from aioserve.scheduler import BaseScheduler, SchedulerOutput


class ShortestPredicted(BaseScheduler):
    """The request with the shortest predicted reply first."""

    def order(self, request):
        return request.hints.get("predicted_output_tokens", 0)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request, whole=True):
                break
        return step.output()
'''


def test_the_logarithm_of_the_error_is_normal_with_the_spread_that_was_asked_for() -> None:
    rng = random.Random(0)
    logs = [math.log(LogNormalError(sigma=0.5).predict(1000, rng) / 1000) for _ in range(4000)]
    assert abs(mean(logs)) < 0.03
    assert pstdev(logs) == pytest.approx(0.5, rel=0.05)


def test_a_class_is_right_as_often_as_was_asked_for() -> None:
    kind = Classes(bounds=(64, 256), accuracy=0.8)
    rng = random.Random(0)
    middles = [round(math.sqrt(a * b)) for a, b in ((1, 64), (64, 256), (256, 512))]
    for number, length in enumerate((10, 256, 257)):
        found = [kind.predict(length, rng) for _ in range(4000)]
        assert set(found) == set(middles)
        assert found.count(middles[number]) / 4000 == pytest.approx(0.8, abs=0.02)


def kendalls_tau(first: list[int], second: list[int]) -> float:
    pairs = [
        (a - b) * (c - d)
        for (a, c), (b, d) in combinations(list(zip(first, second, strict=True)), 2)
    ]
    return sum((p > 0) - (p < 0) for p in pairs) / len(pairs)


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_predicted_ranks_have_the_correlation_that_was_asked_for(tau: float) -> None:
    rng = random.Random(0)
    lengths = rng.sample(range(1, 100_000), 800)
    found = Ranks(tau=tau).predict_all(lengths, random.Random(1))
    assert sorted(found) == sorted(lengths)
    assert kendalls_tau(lengths, found) == pytest.approx(tau, abs=0.05)


def test_a_greater_error_is_more_of_the_same_one() -> None:
    lengths = [1000] * 50
    half, whole = (
        LogNormalError(sigma=sigma).predict_all(lengths, random.Random(0)) for sigma in (0.5, 1)
    )
    for a, b in zip(half, whole, strict=True):
        assert b / 1000 == pytest.approx((a / 1000) ** 2, rel=0.02)


def test_predictions_are_taken_away_and_other_hints_stay() -> None:
    request = WorkloadRequest(0.0, (Piece(0, 5),), 3, hints={"slo_class": "a"})
    workload = Workload("w", (request,))
    assert without_predictions(with_predictions(workload, Exact())) == workload


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exact", Exact()),
        ("lognormal:0.5", LogNormalError(sigma=0.5)),
        ("ranks:0.6", Ranks(tau=0.6)),
        ("classes:64,256:0.8", Classes(bounds=(64, 256), accuracy=0.8)),
        ("classes:64", Classes(bounds=(64,))),
    ],
)
def test_a_prediction_is_read_from_the_command_line(text: str, expected: AnyPrediction) -> None:
    assert parse_prediction(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "perfect", "exact:1", "lognormal", "lognormal:-1", "ranks", "ranks:1.1"),
        *("classes:256,64", "classes:a:1"),
    ],
)
def test_a_prediction_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_prediction(text)


def test_a_class_of_a_workload_file_states_hints_and_predictions(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(
        "arrivals: {kind: poisson, rate: 5}\nnum_requests: 40\nclasses:\n"
        "  - {name: a, prompt: {kind: constant, value: 5}, output: {kind: uniform, min: 1, max: 9}"
        ", prediction: {kind: exact}, hints: {slo_class: fast}}\n"
        "  - {name: b, prompt: {kind: constant, value: 5}, output: {kind: constant, value: 3}}\n"
    )
    for request in generate(read_spec(file)).requests:
        told = {PREDICTED_OUTPUT_TOKENS: request.output_tokens, "slo_class": "fast"}
        assert request.hints == (told if request.kind == "a" else {})
    file.write_text(file.read_text().replace("slo_class: fast", "'?': fast"))
    with pytest.raises(ConfigError, match="the name of a hint"):
        read_spec(file)


@pytest.mark.slow
def test_the_better_the_prediction_the_sooner_shortest_predicted_first_serves(
    tmp_path: Path,
) -> None:
    """A curve: from a perfect predictor to one that says nothing."""
    file = tmp_path / "shortest_predicted.py"
    file.write_text(SHORTEST_PREDICTED)
    rng = random.Random(1)
    requests = tuple(
        WorkloadRequest(0.02 * i, (Piece(i, 20),), max(round(40 * math.exp(rng.gauss(0, 1))), 1))
        for i in range(200)
    )
    settings = [("scheduler.policy", str(file)), ("scheduler.max_num_seqs", 4)]
    config = msgspec.structs.replace(EngineConfig.load(None, settings), runner=EXACT)
    workload = Workload("w", requests)

    def mean_ttft(told: Workload) -> float:
        return mean(request.ttft for request in simulate(config, told).requests)

    found = [
        mean_ttft(with_predictions(workload, kind))
        for kind in (Exact(), LogNormalError(sigma=0.5), LogNormalError(sigma=2.0))
    ]
    assert found == sorted(found)
    assert found[0] < 0.8 * found[2] < mean_ttft(workload)
