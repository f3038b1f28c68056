"""The page of the zoo has every policy of today, with the numbers that are stored."""

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from aioserve.lab.zoo.gallery import NINE, QUESTIONS
from aioserve.lab.zoo.page import DARK, LIGHT, NUM_SHADES
from aioserve.lab.zoo.standing import WORKLOADS, load_workload, policy_names
from tests.policy_names import SHIPPED
from tests.programs import load_program

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load_program("docs/make_zoo.py")


def test_the_page_and_its_chart_are_made_of_the_stored_results(maker: ModuleType) -> None:
    for name, text in maker.pages().items():
        assert (DOCS / name).read_text() == text, "python docs/make_zoo.py writes it anew"


def test_the_page_names_every_policy_and_the_chart_has_a_row_for_each() -> None:
    page = (DOCS / "zoo.md").read_text()
    rows = re.findall(r"^\| \d+[^|]*\| \[([\w.]+)\]\(", page, re.MULTILINE)
    assert sorted(rows) == policy_names()
    drawn = re.findall(r'class="name"[^>]*>([\w.]+)<', (DOCS / "zoo.svg").read_text())
    assert drawn == rows
    assert sorted(NINE) == SHIPPED
    assert {question.workload for question in QUESTIONS} <= set(WORKLOADS)


def test_the_page_states_the_limits_by_which_requests_are_judged() -> None:
    page = (DOCS / "zoo.md").read_text()
    stated = re.findall(r"^\| (\w+) \| (\w+) \| ([\d. |]+) \|$", page, re.MULTILINE)
    names = ("ttft", "tpot", "gap", "e2e", "program")
    judged = {
        (workload, kind): [getattr(slo, name) for name in names]
        for workload in WORKLOADS
        for kind, slo in load_workload(workload, 1).classes.items()
    }
    assert judged == {
        (workload, kind): [float(cell) if cell.strip() else None for cell in cells.split(" | ")]
        for workload, kind, cells in stated
    }


def test_who_can_state_lengths_is_shown_policies_that_need_none_as_well() -> None:
    """`deadline` has more of the chats in time than every policy that goes by lengths."""
    page = (DOCS / "zoo.md").read_text()
    [with_lengths] = re.findall(r"^\| 5\. .*", page, re.MULTILINE)
    named = re.findall(r"`([\w.]+)` (\d+)%", with_lengths)
    assert named[0][0] == "deadline"
    assert {"zoo.gittins", "zoo.svf"} <= {name for name, _ in named}


def luminance(colour: str) -> float:
    """Of WCAG 2, from 0 to 1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in range(1, len(colour), 2)]
    if len(channels) < 3:
        channels = [int(c * 2, 16) / 255 for c in colour[1:]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("shades", [LIGHT, DARK], ids=["light", "dark"])
def test_numbers_can_be_read_on_every_shade_and_shades_go_one_way(
    shades: list[tuple[str, str]],
) -> None:
    assert len(shades) == NUM_SHADES
    for fill, ink in shades:
        low, high = sorted((luminance(fill), luminance(ink)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (fill, ink)
    steps = [luminance(fill) for fill, _ in shades]
    assert steps in (sorted(steps), sorted(steps, reverse=True))


def test_the_chart_is_xml_without_links() -> None:
    root = ElementTree.fromstring((DOCS / "zoo.svg").read_text())
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in (DOCS / "zoo.svg").read_text()
