"""The benchmark of hostile clients runs, with each kind of them beside a real server."""

import json
import sys

import pytest
from hostile import KINDS

from tests.processes import run


@pytest.mark.slow
def test_each_kind_is_measured_beside_those_who_behave() -> None:
    result = run(
        *(sys.executable, "benchmarks/hostile.py"),
        *("--streams", "2", "--seconds", "0.5", "--rounds", "1"),
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["beside"] for row in rows] == list(KINDS)
    for row in rows:
        assert row["tokens/s"] > 0, row
        assert row["p99 gap"] > 0, row
