"""The tour of docs/tour.md stays short, and what it tells the reader to read is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs/tour.md").read_text()
STOPS = re.findall(r"^## \d+\. .*?\]\(\.\./([\w./]+)\)\n(.*?)(?=^## )", TOUR, re.M | re.S)


def test_the_tour_has_twelve_files_of_at_most_4500_lines() -> None:
    assert len(STOPS) == 12
    assert sum((ROOT / name).read_text().count("\n") for name, _ in STOPS) <= 4500


@pytest.mark.parametrize(("name", "told"), STOPS, ids=[name for name, _ in STOPS])
def test_what_is_to_be_read_is_in_that_file(name: str, told: str) -> None:
    """Every name in code of the sentences that begin with Read is used in the file."""
    source = (ROOT / name).read_text()
    reading = " ".join(re.findall(r"(?:Read|Then|then) .*?(?:\.\s|$)", told, re.S))
    names = re.findall(r"`(\w+)`", reading)
    assert [one for one in names if not re.search(rf"\b{one}\b", source)] == []
