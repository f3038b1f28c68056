"""Everything mixed against one server: answers are right, and what was taken is given back."""

import json
import sys
from pathlib import Path

import pytest

from tests.processes import run

MEMORY = (
    "resident memory: less than 16 MiB more",
    "resident memory of processes beside it: less than 16 MiB more",
    "tracemalloc: less than 512 KiB more",
)


def soak(path: Path, *words: str) -> dict[str, dict[str, object]]:
    """What became of each limit."""
    result = run(sys.executable, "benchmarks/soak.py", *words, "--plot", str(path / "plot.svg"))
    assert result.stdout, result.stderr
    assert (path / "plot.svg").read_text().count("<path") == 6
    limits: dict[str, dict[str, object]] = json.loads(result.stdout.splitlines()[-1])["limits"]
    return limits


@pytest.mark.slow
def test_mixed_requests_are_answered_rightly_and_leave_nothing(tmp_path: Path) -> None:
    """Without the limits of memory, which caches have not filled yet."""
    limits = soak(tmp_path, "--seconds", "10", "--round", "5", "--clients", "6")
    missed = {name: it for name, it in limits.items() if not it["held"] and name not in MEMORY}
    assert not missed


@pytest.mark.slow
def test_two_minutes_of_mixed_requests_take_no_more_memory(tmp_path: Path) -> None:
    limits = soak(tmp_path, "--seconds", "120", "--round", "8")
    assert not {name: it for name, it in limits.items() if not it["held"]}
