"""`zoo` runs a policy on the standard workloads, and says where it stands among those stored."""

import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve.cli.main import main
from aioserve.lab.comparison.candidates import settings_of
from aioserve.lab.comparison.document import compare
from aioserve.lab.simulation.run import simulate
from aioserve.lab.zoo import commands
from aioserve.lab.zoo.cost import measure_costs
from aioserve.lab.zoo.standing import (
    DIGEST,
    MEASURES,
    ONE_ENGINE,
    SEEDS,
    SETTINGS,
    WORKLOADS,
    Entry,
    Results,
    key,
    load_policies,
    load_workload,
    measure_run,
    measured_file,
    policy_names,
    prepared,
    read_results,
    reproducing,
    run_standard,
    write_results,
)

ROOT = Path(__file__).parents[3]
MINE = f"{ROOT}/examples/recipes/shortest_predicted.py:ShortestPredictedScheduler"


@pytest.fixture
def cheap_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tenth of the requests that wait."""
    monkeypatch.setattr(commands, "measure_costs", lambda configs: measure_costs(configs, 1000))


@pytest.mark.slow
@pytest.mark.usefixtures("cheap_costs")
def test_a_policy_of_a_file_is_ranked_among_all_that_ship(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    html, data = tmp_path / "mine.html", tmp_path / "mine.json"
    assert (
        main(["zoo", MINE, "--quick", "--jobs", "1", "--html", str(html), "--json", str(data)]) == 0
    )
    out = capsys.readouterr().out
    lines = out.splitlines()
    names = [*policy_names(), "ShortestPredictedScheduler"]
    assert lines[0].startswith(f"zoo-1 ({DIGEST}), 1 seed")
    board = [line.split() for line in lines[2 : 2 + len(names)]]
    assert sorted(cells[1] for cells in board) == sorted(names)
    place = [cells[1] for cells in board].index("ShortestPredictedScheduler") + 1
    assert f"\nShortestPredictedScheduler: rank {place} of {len(names)}, " in out
    assert "\nnext above: " in out
    assert "one seed does not say which differences are chance" in out
    assert "not told apart from" not in out
    found: dict[str, Any] = json.loads(data.read_text())
    assert found["digest"] == DIGEST
    mine = found["policies"]["ShortestPredictedScheduler"]
    assert mine["ranks"]["chat"]["in_time"]["of"] == len(names)
    assert mine["cost"]["waiting"] >= 900
    assert list(mine["scores"]) == list(WORKLOADS)
    page = html.read_text()
    assert "ShortestPredictedScheduler" in page
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@cache
def scores_of(name: str) -> dict[str, list[float]]:
    """What the zoo measures of `fcfs` on one workload."""
    [scores] = run_standard(load_policies(["fcfs"]), SEEDS[:1], workloads=[name])
    return scores[name]


@pytest.mark.slow  # the next one asks it of `documents` in every run
@pytest.mark.parametrize("name", ["tenants", "agents"])
def test_what_an_engine_measures_is_what_is_stored_of_it(name: str) -> None:
    """The zoo simulates by the quick way of fleets; the engine itself gives the same to the last
    digit, also where programs send requests at one time.
    """
    [candidate] = load_policies(["fcfs"])
    workload = load_workload(name, SEEDS[0])
    by_engine = measure_run(simulate(prepared(candidate, workload).config, workload), workload)
    scores = scores_of(name)
    assert by_engine.keys() == {key(row) for row in MEASURES}
    for measure, value in by_engine.items():
        if not math.isnan(value):  # the engine does not count for how long it was busy
            assert scores[measure] == [value], measure


@pytest.mark.slow
def test_the_share_in_time_is_the_mean_over_classes_of_requests_or_programs() -> None:
    """A few programs of agents count as much as many chats."""
    [candidate] = load_policies(["fcfs"])
    workload = load_workload("agents", SEEDS[0])
    document = compare([msgspec.structs.replace(candidate, fleet=ONE_ENGINE)], [workload])
    by_class = document["results"][0]["slo"]["by_class"]
    shares = [by_class["agent"]["programs_in_time"], by_class["chat"]["good_share"]]
    assert scores_of("agents")["in_time"] == [pytest.approx(sum(shares) / 2, rel=1e-5)]


def test_compare_on_the_machine_of_the_zoo_prints_a_cell_of_its_board(tmp_path: Path) -> None:
    """By the command that `zoo` prints."""
    data = tmp_path / "cell.json"
    command = reproducing("fcfs", 1).replace("WORKLOAD", "documents")
    assert main([*command.split()[3:], "--json", str(data)]) == 0
    stored = read_results().policies
    for result in json.loads(data.read_bytes())["results"]:
        scores = stored[result["name"]].scores["documents"]
        assert result["totals"]["in_time"] == scores["in_time"][0]
        for measure in ("goodput_per_second", "output_tokens_per_second", "unfinished"):
            assert result["totals"][measure] == scores[measure][0]
        assert result["durations"]["e2e"]["p99"] == scores["e2e.p99"][0]


def test_compare_on_a_card_prints_a_cell_of_its_board(tmp_path: Path) -> None:
    """By the command that `zoo --card` prints."""
    data, card = tmp_path / "cell.json", "h100-llama-3.1-8b"
    board = read_results(measured_file(card))
    command = reproducing("fcfs", 1, f"--card {card}", board.scales)
    command, _, factors = command.removesuffix(")").partition("\n(SCALE is ")
    assert f"{board.scales['code']:g} for code" in factors
    command = command.replace("WORKLOAD", "code").replace("SCALE", f"{board.scales['code']:g}")
    assert main([*command.split()[3:], "--json", str(data)]) == 0
    [result] = json.loads(data.read_bytes())["results"]
    scores = board.policies["fcfs"].scores["code"]
    for measure in ("in_time", "output_tokens_per_second", "joules_per_output_token"):
        assert result["totals"][measure] == scores[measure][0]
    assert result["durations"]["e2e"]["p99"] == scores["e2e.p99"][0]


def test_seeds_and_costs_alone_are_added_to_what_is_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = read_results().policies["fcfs"]
    stored = msgspec.structs.replace(entry.only(1), scores={"code": entry.only(1).scores["code"]})
    path = tmp_path / "results.json"
    write_results(Results().with_entries({"fcfs": stored}), path)
    monkeypatch.setattr(commands, "FILE", path)
    monkeypatch.setattr(commands, "run_standard", partial(run_standard, workloads=["code"]))
    monkeypatch.setattr(commands, "measure_costs", lambda configs: measure_costs(configs, 100))

    assert main(["zoo", "fcfs", "--store", "--only", "seeds", "--seeds", "2", "--jobs", "1"]) == 0
    assert capsys.readouterr().out == "stored: seeds of fcfs\n"
    longer = read_results(path).policies["fcfs"]
    assert repr(longer.scores["code"]) == repr(entry.only(2).scores["code"])
    assert longer.cost == entry.cost
    assert main(["zoo", "fcfs", "--store", "--only", "seeds", "--seeds", "2"]) == 0
    assert capsys.readouterr().out == ""  # they are there

    assert main(["zoo", "fcfs", "--store", "--only", "costs"]) == 0
    again = read_results(path).policies["fcfs"]
    assert repr(again.scores) == repr(longer.scores)
    assert again.cost is not None
    assert again.cost.waiting <= 100

    write_results(Results().with_entries({"fcfs": Entry("old", stored.scores)}), path)
    assert main(["zoo", "fcfs", "--store", "--only", "costs"]) == 2
    assert "those of fcfs are none: python -m aioserve zoo fcfs --store" in capsys.readouterr().err


def test_a_policy_that_is_stored_anew_takes_no_seeds_from_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where what `--only seeds` adds was cut short, some policies have more seeds than others."""
    stored = read_results().policies
    once = stored["fcfs"].only(1)
    path = tmp_path / "results.json"
    write_results(
        Results().with_entries({"zoo.sjf": stored["zoo.sjf"].only(2), "fcfs": once}), path
    )
    monkeypatch.setattr(commands, "FILE", path)
    monkeypatch.setattr(commands, "policy_names", lambda: ["fcfs", "zoo.sjf"])
    monkeypatch.setattr(commands, "_measure", lambda *asked: {"fcfs": once})
    assert main(["zoo", "fcfs", "--store"]) == 0
    assert read_results(path).policies["zoo.sjf"].num_seeds == 2
    assert main(["zoo", "fcfs", "--seeds", "2"]) == 2  # nothing to compare the second seed with


def test_the_machine_of_the_zoo_has_the_settings_of_the_standard() -> None:
    assert {name: str(value) for name, value in settings_of("zoo-1")} == dict(SETTINGS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zoo.srtp"], "unknown config 'zoo.srtp' (did you mean 'zoo.srpt'?)"),
        ([MINE, "--store"], "--store keeps results of policies that ship"),
        (["fcfs", "--quick", "--store"], "--store keeps no fewer seeds than are stored"),
        (["fcfs", "--quick", "--seeds", "1"], "--quick is one seed: give it without --seeds"),
        (
            ["fcfs", "--only", "costs"],
            "--only adds to the stored results of the standard's machine",
        ),
        (["fcfs", "--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_work(
    words: list[str], message: str, refused: Callable[[list[str], str], None]
) -> None:
    refused(["zoo", *words], message)
