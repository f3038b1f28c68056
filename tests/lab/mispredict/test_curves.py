"""A policy that needs predictions is as good as they are, beside a baseline that has none."""

import math
import random
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.document import Apart
from aioserve.lab.comparison.measures import parse_measure
from aioserve.lab.mispredict import (
    Curve,
    Curves,
    Errors,
    Point,
    crossing,
    draw,
    in_words,
    measure_curves,
    render,
    render_page,
)
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.request import PREDICTED_OUTPUT_TOKENS
from tests.lab.simulation.test_run import EXACT

E2E = parse_measure("e2e:mean")
NUM_LOADS = 2  # seeds
NUM_REQUESTS = 30
UNTOLD = '''
from aioserve.policies.fcfs import FCFSScheduler


class Untold(FCFSScheduler):
    """First come, first served; raises if a request has a prediction."""

    def order(self, request):
        assert "predicted_output_tokens" not in request.hints
        return request.arrival_time
'''


def candidate(policy: str, name: str = "") -> Candidate:
    settings = [("scheduler.policy", policy), ("scheduler.max_num_seqs", 4)]
    config = msgspec.structs.replace(EngineConfig.load(None, settings), runner=EXACT)
    return Candidate(name or policy, config)


def crowd(seed: int, num_requests: int) -> Workload:
    """More requests than four seats can serve, with replies of very different lengths."""
    rng = random.Random(seed)
    requests = tuple(
        WorkloadRequest(
            0.02 * i,
            (Piece(i, 20),),
            max(round(40 * math.exp(rng.gauss(0, 1))), 1),
            hints={PREDICTED_OUTPUT_TOKENS: 1},  # of the workload itself, and wrong
        )
        for i in range(num_requests)
    )
    return Workload("crowd", requests, seed)


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return measured(tmp_path_factory, NUM_LOADS, NUM_REQUESTS)


@pytest.fixture(scope="module")
def sure_curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """Of more and longer runs, which leave less to chance."""
    return measured(tmp_path_factory, 4, 100)


def measured(tmp_path_factory: pytest.TempPathFactory, num_loads: int, num_requests: int) -> Curves:
    file = tmp_path_factory.mktemp("policies") / "untold.py"
    file.write_text(UNTOLD)
    policies = [candidate("zoo.sjf"), candidate("zoo.mc_sf")]
    errors = Errors.parse("lognormal:0,0.5,4")
    loads = [crowd(seed, num_requests) for seed in range(num_loads)]
    return measure_curves(policies, candidate(str(file), "untold"), loads, errors, E2E)


@pytest.mark.slow
def test_exact_lengths_are_worth_much_and_those_that_are_wrong_little(
    sure_curves: Curves,
) -> None:
    curves = sure_curves
    for curve in curves.curves:
        values = [point.value for point in curve.points]
        assert values == sorted(values)
        assert values[0] < 0.8 * curves.baseline_value
        first = curve.points[0]
        assert first.against_baseline.verdict == first.against_blind.verdict == "better"
        assert first.against_blind.high is not None
        assert first.against_blind.high < 0


def test_a_policy_without_predictions_is_compared_as_well(curves: Curves) -> None:
    """Shortest first with nothing predicted is first come, first served."""
    sjf = curves.curves[0]
    assert sjf.blind == pytest.approx(curves.baseline_value, rel=0.02)


def test_the_same_input_gives_the_same_curves(curves: Curves) -> None:
    """The baseline is another one here: a policy does not see what others are compared with it."""
    loads = [crowd(seed, NUM_REQUESTS) for seed in range(NUM_LOADS)]
    errors = Errors.parse("lognormal:4")
    again = measure_curves([candidate("zoo.sjf")], candidate("fcfs"), loads, errors, E2E)
    assert [p.value for p in again.curves[0].points] == [curves.curves[0].points[-1].value]


def test_table_chart_and_page_show_every_policy_and_error(curves: Curves) -> None:
    table, chart, page = render(curves), draw(curves), render_page(curves)
    ElementTree.fromstring(chart)
    for text in (table, chart, page):
        assert "zoo.sjf" in text
        assert "zoo.mc_sf" in text
    assert chart.count('class="dot"') == chart.count('class="bar"') - 1 == 6  # one is the legend
    for curve in curves.curves:
        for sentence in in_words(curve, curves):
            assert sentence in table
            assert sentence in page


def test_a_measure_that_no_request_has_is_refused() -> None:
    errors = Errors.parse("lognormal:0")
    row = parse_measure("good_share")
    with pytest.raises(ConfigError, match="good_share is not defined"):
        measure_curves([candidate("zoo.sjf")], candidate("fcfs"), [crowd(0, 20)], errors, row)


def test_the_means_cross_between_two_errors_on_a_straight_line() -> None:
    assert crossing([0, 1, 2], [-10, -5, 15], E2E) == 1.25
    assert crossing([0, 1, 2], [-10, -5, -1], E2E) is None
    assert crossing([0, 1, 2], [10, 5, 1], E2E) is None  # behind from the first on
    assert crossing([1, 0.5, 0], [0.2, -0.2, -0.3], parse_measure("good_share")) == 0.75


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ("better better better", "is ahead of fcfs at every sigma from 0 to 2"),
        ("better better worse", "is ahead of fcfs at sigma 0 to 1, behind it at 2"),
        (
            "better noise worse",
            "is ahead of fcfs at sigma 0, not distinguishable from it at 1, behind it at 2",
        ),
        ("worse worse worse", "is behind fcfs at every sigma from 0 to 2"),
    ],
)
def test_where_a_policy_falls_behind_is_said_in_words(verdicts: str, said: str) -> None:
    apart = [Apart(-1.0, -2.0, -0.5, verdict) for verdict in verdicts.split()]
    points = [Point(float(i), 9.0, a, a) for i, a in enumerate(apart)]
    curve = Curve("mine", 10.0, apart[0], points)
    curves = Curves("w", 10, 1.0, [0, 1], "e2e:mean", "lognormal", "fcfs", 10.0, [curve])
    assert f"mine {said}" in in_words(curve, curves)[0]


def test_a_measure_is_named_as_a_bound_is() -> None:
    assert parse_measure("gap:p99").label == "gap p99, ms"
    assert parse_measure("good_share").good == 1
    with pytest.raises(ConfigError, match=r"unknown measure 'e2e:mena' \(did you mean 'e2e:mean'"):
        parse_measure("e2e:mena")


def test_the_command_prints_and_writes_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from aioserve.cli.main import main

    files = {name: tmp_path / f"curves.{name}" for name in ("json", "html", "svg")}
    words = ["mispredict", "zoo.sjf", "--against", "fcfs", "--workload", "mixed", "--limit", "60"]
    words += ["--errors", "ranks:1,0", "--seeds", "2", "--measure", "ttft:mean"]
    for name, path in files.items():
        words += [f"--{name}", str(path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "zoo.sjf is " in printed
    assert "fcfs at " in printed
    assert "tau: Kendall's rank correlation of predicted and true lengths" in printed
    found = msgspec.json.decode(files["json"].read_bytes(), type=Curves)
    assert [point.error for point in found.curves[0].points] == [1, 0]
    assert found.seeds == [0, 1]
    assert files["svg"].read_text() == draw(found)
    assert files["html"].read_text() == render_page(found)
