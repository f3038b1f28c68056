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
    found = json.loads(result.stdout.splitlines()[-1])
    assert found.keys() == KINDS.keys()
    for kind, row in found.items():
        assert row["tokens_per_second_ratio"] > 0, kind
        assert row["p99_gap_ratio"] > 0, kind
