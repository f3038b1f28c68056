"""A server that is asked for ten times what it can serve refuses honestly and keeps nothing."""

import json
import sys
from pathlib import Path

import pytest
from overload import KINDS

from tests.processes import run


@pytest.mark.slow
def test_a_flood_is_served_or_refused_with_429_and_waits_in_a_bounded_queue(tmp_path: Path) -> None:
    """Without the limits of time, which depend on what else the machine does."""
    result = run(
        *(sys.executable, "benchmarks/overload.py", "flood", "--seconds", "5", "--calm", "4"),
        *("--seats", "4", "--waiting", "8", "--plot", str(tmp_path / "plot.svg")),
    )
    assert result.returncode == 0, result.stderr
    limits = json.loads(result.stdout.splitlines()[-1])["limits"]
    for limit in (
        "every request is served or refused with 429",
        "every 429 says when to come back",
        "at most 8 wait",
        "resident memory grows by less than 48 MiB",
    ):
        assert limits[limit]["held"], (limit, limits[limit]["seen"])
    assert (tmp_path / "plot.svg").read_text().count("<path") == 9


@pytest.mark.slow
def test_each_kind_is_measured_beside_those_who_behave() -> None:
    result = run(
        *(sys.executable, "benchmarks/overload.py", "hostile"),
        *("--streams", "2", "--seconds", "0.5", "--rounds", "1"),
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["beside"] for row in rows] == list(KINDS)
    for row in rows:
        assert row["tokens/s"] > 0, row
        assert row["p99 gap"] > 0, row
