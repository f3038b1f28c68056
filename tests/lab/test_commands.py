"""The lab's commands as a user runs them: output, files, one-line errors."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from aioserve.cli import main

ROOT = Path(__file__).parents[2]
FCFS, CHUNKED = str(ROOT / "configs/fcfs.yaml"), str(ROOT / "configs/chunked_prefill.yaml")
MIXED = str(ROOT / "configs/workloads/mixed.yaml")
SMALL = ["--workload", MIXED, "--limit", "40"]


def test_compare_prints_a_table_and_writes_json_and_html(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["compare", FCFS, CHUNKED, *SMALL, "--seeds", "3", "--slo", "ttft=1,tpot=0.05"]
    assert main([*words, "--json", str(data), "--html", str(page)]) == 0
    printed = capsys.readouterr()
    assert re.search(r"gap p99, ms +[\d.]+ +[\d.]+ +-[\d.]+ .*better", printed.out)
    assert "within the SLO, %" in printed.out
    assert printed.err == ""  # not a terminal: no progress bar
    assert len(json.loads(data.read_bytes())["results"]) == 2
    assert page.read_text().startswith("<!doctype html>")


def test_search_finds_the_knee_between_two_probes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "knee.json"
    words = ["search", CHUNKED, "--workload", MIXED, "--limit", "150", "--slo", "ttft=0.5"]
    assert main([*words, "--tolerance", "0.1", "--json", str(data)]) == 0
    knee = json.loads(data.read_bytes())
    assert 5 < knee["rate"] < knee["rate_above"] <= knee["rate"] * 1.1
    assert all(probe["is_met"] == (probe["good_share"] >= 0.99) for probe in knee["probes"])
    assert all(probe["is_met"] == (probe["rate"] <= knee["rate"]) for probe in knee["probes"])
    assert "meets the SLO for 99% of the requests up to" in capsys.readouterr().out


def test_sweep_prints_a_line_for_each_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "sweep.html"
    words = ["sweep", CHUNKED, *SMALL, "--seeds", "3", "--html", str(page)]
    assert main([*words, "--set", "scheduler.options.chunk_size=64,256,1024"]) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    found = {int(words[0]): words for words in lines if words and words[0].isdecimal()}
    assert list(found) == [64, 256, 1024]
    worst_gap = [float(found[size][5]) for size in found]
    assert worst_gap == sorted(worst_gap)
    assert '"values":["64","256","1024"]' in page.read_text()
    intervals = re.findall(r"[-+]?[\d.]+%? \.\. [-+]?[\d.]+[%x]", printed)
    assert len(intervals) == 2 * 7  # of all but the first value, and not of maxima
    assert "the 95% interval of its change from that of 64" in printed


def test_a_sweep_of_one_short_seed_says_that_it_has_no_intervals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "sweep",
        CHUNKED,
        *SMALL,
        "--seeds",
        "1",
        "--set",
        "scheduler.options.chunk_size=64,99",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert ".." not in printed
    assert "no interval from so few seeds or requests" in printed


def test_a_trace_runs_without_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps({"arrival": 0.1 * i, "prompt_tokens": 50 + i, "output_tokens": 5})
            for i in range(50)
        )
    )
    assert main(["compare", FCFS, CHUNKED, "--workload", str(trace), "--time-scale", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "t.jsonl: 50 requests in 2 s, in virtual time" in printed
    assert "intervals come from blocks of time" in printed


def test_live_runs_the_real_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"arrival": 0, "prompt_tokens": 20, "output_tokens": 5}\n' * 3)
    words = ["compare", FCFS, CHUNKED, "--workload", str(trace), "--live", "--seeds", "1"]
    assert main([*words, "--set", "cache.num_kv_blocks=300"]) == 0
    assert "in real time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", FCFS], "--workload"),
        (["compare", "none.yaml", "--workload", MIXED], "cannot read config file none.yaml"),
        (["compare", FCFS, "--workload", "none.yaml"], "cannot read workload none.yaml"),
        (["compare", FCFS, "--workload", "a.txt"], "expected .yaml"),
        (["compare", FCFS, "--workload", MIXED, "--slo", "ttft"], "an SLO looks like"),
        (["compare", FCFS, "--workload", MIXED, "--seeds", "-1"], "--seeds must be at least 1"),
        (["compare", FCFS, "--workload", MIXED, "--set", "x"], "SECTION.NAME=VALUE"),
        (["compare", FCFS, "--workload", MIXED, "--time-scale", "0"], "time scale"),
        (
            ["compare", FCFS, "--workload", MIXED, "--set", "model.max_model_len=1000"],
            "max_model_len allows 1000",
        ),
        (["search", FCFS, *SMALL], "search needs --slo"),
        (["search", FCFS, *SMALL, "--slo", "ttft=1", "--goodput", "2"], "--goodput"),
        (["sweep", FCFS, *SMALL], "one --set with several values"),
        (["sweep", CHUNKED, *SMALL, "--set", "scheduler.options.chunk_size=0,1"], "chunk_size"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(words)
    except SystemExit as error:
        code = error.code
    printed = capsys.readouterr().err
    assert code == 2
    assert message in printed
    assert printed.count("\n") == 1


def test_make_ab_compares_the_three_main_policies() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    printed = subprocess.run([make, "-n", "ab"], capture_output=True, text=True, cwd=ROOT).stdout
    for name in ("fcfs", "chunked_prefill", "priority", "workloads/mixed"):
        assert f"configs/{name}.yaml" in printed
