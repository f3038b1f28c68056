"""The page on robustness shows what is stored, of the commands that it prints."""

import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.programs import load_program

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load_program("docs/make_robustness.py")


def test_the_page_and_its_charts_are_made_of_the_stored_results(maker: ModuleType) -> None:
    for name, text in maker.pages().items():
        assert (DOCS / name).read_text() == text, "python docs/make_robustness.py writes it anew"


def test_every_stored_result_is_of_the_command_that_measures_it_anew(maker: ModuleType) -> None:
    stored = json.loads((DOCS / "robustness.json").read_bytes())
    assert {name: entry["command"] for name, entry in stored.items()} == maker.RUNS
    assert all(entry["date"] and entry["machine"] for entry in stored.values())


def test_five_policies_of_the_zoo_have_a_curve_on_each_of_two_workloads() -> None:
    stored = json.loads((DOCS / "robustness.json").read_bytes())
    drawn = {name: entry["found"] for name, entry in stored.items() if "curves" in entry["found"]}
    assert len({found["workload"] for found in drawn.values()}) == 2
    for name, found in drawn.items():
        chart = (DOCS / f"robustness-{name}.svg").read_text()
        ElementTree.fromstring(chart)
        policies = [curve["policy"] for curve in found["curves"]]
        zoo = [policy for policy in policies if "zoo." in policy or "peak_memory" in policy]
        assert len(zoo) >= 5
        assert all(f">{policy}</text>" in chart for policy in policies)
