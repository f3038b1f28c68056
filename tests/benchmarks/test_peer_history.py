"""Runs of `peers.py` that were written: a line each, and a table of ratios to the best peer."""

from pathlib import Path

import msgspec
from peers import HISTORY, Run, history_table, remember


def _run(revision: str, date: str, ours: float) -> Run:
    rates = {
        "bfloat16": {
            "aioserve": {"W1": ours, "W2": 30.0},
            "aioserve, `--kv-cache-dtype int8`": {"W1": 2 * ours, "W2": 90.0},
            "llama.cpp": {"W1": 50.0},
            "vLLM (CPU)": {"W1": 80.0, "W2": 60.0},
        },
        "Q8_0": {"aioserve": {"W1": 9.0}, "aioserve, `--activations int8`": {"W1": 12.0}},
    }
    return Run("0.3.0", revision, date, "a CPU", 2, 3, rates)


def test_a_ratio_is_to_the_best_peer_of_the_same_weights_and_missing_without_one() -> None:
    run = _run("a", "2026-11-01", 100.0)
    assert run.ratio("bfloat16", "W1") == 1.25
    assert run.ratio("bfloat16", "W2") == 0.5
    assert run.ratio("bfloat16", "W3") is None
    assert run.ratio("Q8_0", "W1") is None


def test_a_revision_is_kept_once_for_each_processor_and_the_table_has_the_newest_first(
    tmp_path: Path,
) -> None:
    path = tmp_path / "history.jsonl"
    remember(_run("b", "2026-11-02", 1.0), path)
    remember(_run("a", "2026-11-01", 100.0), path)
    runs = remember(_run("b", "2026-11-02", 160.0), path)
    assert [(run.revision, run.rates["bfloat16"]["aioserve"]["W1"]) for run in runs] == [
        ("a", 100.0),
        ("b", 160.0),
    ]
    rows = history_table(runs).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 0.3.0 (b)", "| 0.3.0 (a)"]
    assert " | 2.00 | 0.50 |" in rows[0]


def test_the_page_has_the_table_of_what_is_kept() -> None:
    runs = [msgspec.json.decode(line, type=Run) for line in HISTORY.read_bytes().splitlines()]
    page = HISTORY.parents[1] / "docs" / "benchmarks.md"
    assert history_table(runs) in page.read_text(encoding="utf-8")
