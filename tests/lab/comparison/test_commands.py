"""The lab's commands as a user runs them: output, files, one-line errors."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aioserve.cli.main import main
from aioserve.lab.comparison.measures import aborts, programs_of
from aioserve.lab.workloads.synthetic import generate, read_spec
from tests import processes
from tests.slow import mostly_slow

ROOT = Path(__file__).parents[3]
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


def test_a_policy_stands_for_the_default_settings_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from policies.fcfs import FCFSScheduler\nclass Mine(FCFSScheduler): pass\n"
    )
    data = tmp_path / "out.json"
    words = ["compare", "fcfs", "mine.py", "mine.py:Mine", *SMALL, "--seeds", "1"]
    assert main([*words, "--json", str(data)]) == 0
    results = json.loads(data.read_bytes())["results"]
    assert [result["policy"] for result in results] == ["fcfs", "mine.py", "mine.py:Mine"]
    assert results[0]["distributions"] == results[1]["distributions"]
    printed = capsys.readouterr().out
    assert re.search(r" fcfs +mine ", printed)
    assert re.search(r" fcfs +Mine ", printed)
    assert main(["compare", "fcfs", "other.py", *SMALL]) == 2
    assert "other.py" in capsys.readouterr().err


def test_like_vllm_stands_for_settings_which_set_overrides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "out.json"
    words = ["compare", FCFS, *SMALL, "--seeds", "1", "--like", "vllm", "--json", str(data)]
    assert main([*words, "--set", "cache.watermark=0.125"]) == 0
    (result,) = json.loads(data.read_bytes())["results"]
    assert result["settings"]["scheduler"]["victim"] == "last_admitted"
    assert result["settings"]["scheduler"]["admit_beside_preemption"] is False
    assert result["settings"]["cache"]["watermark"] == 0.125
    assert main(["compare", FCFS, *SMALL, "--like", "sglang"]) == 2
    assert "--like: like must be one of vllm, got 'sglang'" in capsys.readouterr().err


def test_search_finds_the_knee_between_two_probes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "knee.json"
    words = ["search", CHUNKED, "--workload", MIXED, "--limit", "80", "--slo", "ttft=0.5"]
    assert main([*words, "--tolerance", "0.1", "--json", str(data)]) == 0
    knee = json.loads(data.read_bytes())
    assert 5 < knee["rate"] < knee["rate_above"] <= knee["rate"] * 1.1
    assert all(probe["is_met"] == (probe["good_share"] >= 0.99) for probe in knee["probes"])
    assert all(probe["is_met"] == (probe["rate"] <= knee["rate"]) for probe in knee["probes"])
    assert "meets the SLO for 99% of the requests up to" in capsys.readouterr().out


def test_classes_have_limits_of_their_own_in_table_report_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    limits = ["--slo", "chat:ttft=0.3,gap=0.05", "--slo", "document:e2e=60"]
    words = ["compare", "fcfs", "chunked_prefill", *SMALL, "--seeds", "3", *limits]
    words += ["--reading-speed", "8,ttft=0.2", "--json", str(data), "--html", str(page)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    said = "Good is a request within its SLO: chat: TTFT within 0.3 s and largest gap within 0.05 s"
    assert said in printed
    assert f"{said}; document: end to end within 60 s" in page.read_text()
    assert "The worst class is chat under fcfs, chat under chunked_prefill." in printed
    document = json.loads(data.read_bytes())
    for result in document["results"]:
        by_class = result["slo"]["by_class"]
        assert result["slo"]["worst_class"] == "chat"
        assert by_class["document"]["good_share"] == 1 > by_class["chat"]["good_share"]
        together = sum(c["requests"] * c["good_share"] for c in by_class.values()) / 120
        assert result["totals"]["good_share"] == pytest.approx(together, abs=1e-4)
        assert 0 < result["totals"]["quality"] < 1
    for label in ("worst class, %", "QoE mean", "goodput, requests/s"):
        assert re.search(rf"{label} +[\d.]+ +[\d.]+", printed)
    assert re.search(r"by client, ms .* SLO, %", printed)


def test_the_shipped_programs_are_measured_against_themselves_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["compare", "fcfs", "--workload", "agents", "--seeds", "1", "--limit", "40"]
    assert main([*words, "--json", str(data), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "The requests make up" in printed
    for label in ("program p99, s", "slowdown mean", "programs in time, %"):
        assert re.search(rf"{label} +[\d.]+", printed)
    document = json.loads(data.read_bytes())
    assert document["workload"]["programs"] > 3
    slowdown = document["results"][0]["durations"]["slowdown"]
    assert slowdown["mean"] > 1
    assert '"program p50, s"' in page.read_text()


def test_search_counts_a_program_as_one(tmp_path: Path) -> None:
    data = tmp_path / "knee.json"
    words = ["search", "fcfs", "--workload", "agents", "--limit", "40", "--tolerance", "0.5"]
    limits = ["--slo", "agent:program=20", "--goodput", "0.5"]
    assert main([*words, *limits, "--json", str(data)]) == 0
    knee = json.loads(data.read_bytes())
    programs = generate(read_spec(ROOT / "configs/workloads/agents.yaml"), 0).cut(limit=40)
    own = [requests for requests in programs_of(programs) if not aborts(programs, requests)]
    chats = [request for request in programs.requests if request.kind == "chat"]
    # What the file says of chats holds beside what the command says of agents.
    counted = len(own) + len(chats)
    for probe in knee["probes"]:
        good = probe["good_share"] * counted
        assert good == pytest.approx(round(good), abs=1e-3)


def test_a_class_that_is_not_there_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("compare", "search"):
        assert main([command, "fcfs", *SMALL, "--slo", "chta:ttft=1"]) == 2
        assert "no class 'chta'; it has chat, document" in capsys.readouterr().err


def test_a_workload_states_limits_and_search_asks_each_class_for_its_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = tmp_path / "own.yaml", []
    text = Path(MIXED).read_text()
    path.write_text(text.replace("    share: 0.1", "    slo: {ttft: 0.5, gap: 2}\n    share: 0.1"))
    words = ["search", CHUNKED, "--workload", str(path), "--limit", "80", "--goodput", "0.9"]
    words += ["--slo", "chat:ttft=0.5", "--tolerance", "0.2"]
    for more in ([], ["--each-class"]):
        data = tmp_path / "knee.json"
        assert main([*words, *more, "--json", str(data)]) == 0
        found.append(json.loads(data.read_bytes()))
    together, each = found
    assert each["rate"] <= together["rate"]
    assert all(p["is_met"] == (p["worst_class_share"] >= 0.9) for p in each["probes"])
    assert {probe["worst_class"] for probe in each["probes"]} <= {"chat", "document"}
    assert "90% of each class up to" in capsys.readouterr().out


def test_search_keeps_statistics_of_the_whole_run_within_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "knee.json"
    words = ["search", CHUNKED, *SMALL, "--tolerance", "0.1", "--json", str(data)]
    assert main([*words, "--bound", "ttft:p50=0.5", "--bound", "gap:p99=0.05"]) == 0
    printed = capsys.readouterr().out
    assert "keeps ttft p50 within 0.5 s and keeps gap p99 within 0.05 s up to" in printed
    probes = json.loads(data.read_bytes())["probes"]
    assert {p["is_met"] for p in probes} == {True, False}
    for probe in probes:
        kept = probe["bounded"]["ttft p50"] <= 0.5 and probe["bounded"]["gap p99"] <= 0.05
        assert probe["is_met"] == kept
        assert probe["good_share"] is None
    assert main([*words, "--bound", "gap:p9=1"]) == 2
    assert "a bound looks like gap:p99=0.2" in capsys.readouterr().err
    assert main(words) == 2
    assert "or --bound gap:p99=0.2" in capsys.readouterr().err


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
    intervals = re.findall(r"([\d.]+)x \.\. ([\d.]+)x", printed)
    assert len(intervals) == 2 * 7  # of all but the first value, and not of maxima
    assert all(0 < float(low) <= float(high) for low, high in intervals)
    assert "the 95% interval of its ratio to that of 64" in printed


def test_a_sweep_over_rates_draws_attainment_and_goodput_of_several_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, svg, page = tmp_path / "out.json", tmp_path / "out.svg", tmp_path / "out.html"
    words = ["sweep", FCFS, CHUNKED, "--workload", MIXED, "--limit", "80", "--seeds", "2"]
    words += ["--slo", "ttft=0.5,gap=0.1", "--rates", "20,4,10", "--target", "0.8"]
    files = ["--json", str(data), "--svg", str(svg), "--html", str(page)]
    assert main([*words, *files]) == 0
    printed = capsys.readouterr().out
    curves = json.loads(data.read_bytes())
    assert curves["rates"] == [4, 10, 20]
    assert [curve["name"] for curve in curves["curves"]] == ["fcfs", "chunked_prefill"]
    for curve in curves["curves"]:
        shares = [point["good_share"]["value"] for point in curve["points"]]
        assert shares == sorted(shares, reverse=True)  # less load, more within the SLO
        for point in curve["points"]:
            share, goodput = point["good_share"], point["goodput_per_second"]["value"]
            assert share["low"] <= share["value"] <= share["high"]
            assert 0 <= goodput <= 1.3 * point["rate"]
    whole, chunked = curves["curves"]
    assert 4 < whole["attains_to"] < 10 < chunked["attains_to"] == 20
    assert all(point["against_first"] is None for point in whole["points"])
    assert chunked["points"][0]["against_first"]["value"] > 0
    assert re.search(r"^ +4 +fcfs +[\d.]+ +[\d.]+ \.\. [\d.]+", printed, re.MULTILINE)
    assert re.search(
        r"^fcfs has 80% within the SLO up to about [\d.]+ requests/s\.$", printed, re.MULTILINE
    )
    assert "chunked_prefill has 80% within the SLO at every rate, up to 20 requests/s." in printed
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")
    assert svg.read_text() in page.read_text()
    assert svg.read_text().count("<polyline") == 2 * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rates", "4"], "no request has an SLO"),
        (["--rates", "0"], "expected a number above 0, got '0'"),
        (["--rates", "4", "--slo", "ttft=1", "--target", "2"], "--target must be above 0"),
        (
            ["--rates", "4", "--set", "scheduler.options.chunk_size=64,99"],
            "--rates sweeps the rate",
        ),
        (["--target", "0.5"], "--target is for curves over load: give --rates as well"),
        ([CHUNKED], "several configurations are swept over --rates only: give one"),
        (["--requests", "--set", "scheduler.options.chunk_size=64,99"], "give --json FILE"),
    ],
)
def test_a_sweep_refuses_what_would_do_nothing(
    words: list[str], message: str, refused: Callable[[list[str], str], None]
) -> None:
    refused(["sweep", CHUNKED, *words, *SMALL], message)


def test_a_sweep_says_where_two_values_do_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", CHUNKED, *SMALL, "--seeds", "3", "--slo", "e2e=3600"]
    assert main([*words, "--set", "scheduler.options.chunk_size=4000,4001"]) == 0
    printed = capsys.readouterr().out
    assert "equal" in printed
    assert ".." not in printed  # neither 1.00x .. 1.00x nor 0.0 .. 0.0


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
    assert "no interval from one run" in printed


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
    assert "a recorded trace needs 150 requests more" in printed


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
        (["compare", FCFS, "--workload", MIXED, "--time-scale", "0"], "--time-scale"),
        (
            ["compare", FCFS, "--workload", MIXED, "--set", "model.max_model_len=1000"],
            "max_model_len allows 1000",
        ),
        (["search", FCFS, *SMALL], "search needs --slo"),
        (["search", FCFS, *SMALL, "--slo", "ttft=1", "--goodput", "2"], "--goodput"),
        (["sweep", FCFS, *SMALL], "one --set with several values"),
        (["sweep", FCFS, *SMALL, "--set", "cache.watermark=0.1"], "got --set cache.watermark=0.1"),
        (["compare", FCFS, *SMALL, "--html", "no/x.html"], "cannot write no/x.html: there is no"),
        (["compare", FCFS, *SMALL, "--json", "/"], "cannot write /: it is a folder"),
        (["search", FCFS, *SMALL, "--slo", "ttft=1", "--json", "no/x"], "there is no folder no"),
        (["trace", "log", "-o", "no/x.json"], "cannot write no/x.json: there is no folder no"),
        (["calibrate", "-o", "no/x.yaml"], "cannot write no/x.yaml: there is no folder no"),
        (["compare", FCFS, *SMALL, "--sedes", "2"], "(did you mean '--seeds'?)"),
        (["comprae", FCFS], "unknown command 'comprae' (did you mean 'compare'?)"),
        (["replay"], "the following arguments are required"),
        (["sweep", CHUNKED, *SMALL, "--set", "scheduler.options.chunk_size=0,1"], "chunk_size"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    words: list[str], message: str, refused: Callable[[list[str], str], None]
) -> None:
    refused(words, message)


RAISING = """
from aioserve.scheduler import BaseScheduler
class Raising(BaseScheduler):
    def schedule(self):
        {}["nobody"]
"""


@pytest.mark.parametrize("jobs", mostly_slow(["1", "2"], but=["2"]))
def test_a_policy_that_raises_ends_the_comparison_in_one_line(
    jobs: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    config = tmp_path / "raising.yaml"
    config.write_text("scheduler: {policy: raising.py}")
    assert main(["compare", FCFS, str(config), *SMALL, "--seeds", "1", "--jobs", jobs]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "aioserve: error: policy Raising raised KeyError('nobody') in schedule() (raising.py:5)\n"
    )


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_comparison_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = RAISING.replace('{}["nobody"]', "os.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "killed.py").write_text(f"import os, signal\n{text}")
    config = tmp_path / "killed.yaml"
    config.write_text("scheduler: {policy: killed.py}")
    assert main(["compare", FCFS, str(config), *SMALL, "--seeds", "1", "--jobs", "2"]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == "aioserve: error: a process that simulated has ended with exit code -9\n"


def test_a_policy_that_raises_ends_a_live_comparison_as_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    config = tmp_path / "raising.yaml"
    config.write_text("scheduler: {policy: raising.py}\nrunner: {runner: simulated}")
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"arrival": 0, "prompt_tokens": 20, "output_tokens": 5}\n')
    assert main(["compare", str(config), "--workload", str(trace), "--live"]) == 1
    assert capfd.readouterr().err.count("\n") == 1


def test_a_workloads_error_is_one_line_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    for text, message in (
        ("classes: [\n", "mine.yaml:2:1: not valid YAML"),
        ("num_request: 5", "`num_request` (did you mean 'num_requests'?)"),
        ("classes: [{name: a, promt: 1}]", "`$.classes[0]` (did you mean 'prompt'?)"),
    ):
        path.write_text(text)
        assert main(["compare", FCFS, "--workload", str(path)]) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert str(path) in printed
        assert "string>" not in printed
        assert printed.count("\n") == 1


LONG = ["compare", FCFS, CHUNKED, "--workload", MIXED, "--seeds", "100"]
SAYS_WHEN_IT_RUNS = """
import sys
from multiprocessing.process import BaseProcess
from aioserve.cli.main import main
from aioserve.lab.simulation import run
def say(*arguments, make=run._EngineClients.__init__, **options):
    print("running", flush=True)
    make(*arguments, **options)
run._EngineClients.__init__ = say
start = BaseProcess.start
BaseProcess.start = lambda process: print("running", flush=True) or start(process)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("jobs", mostly_slow(["1", "2"], but=["2"]))
def test_ctrl_c_is_a_line_and_130_and_leaves_no_process_behind(jobs: str, tmp_path: Path) -> None:
    """As from a terminal: all processes of the group hear of it."""
    script = tmp_path / "script.py"
    script.write_text(SAYS_WHEN_IT_RUNS)
    command = [sys.executable, str(script), *LONG, "--jobs", jobs]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.started(*command, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "running\n"
        os.killpg(process.pid, signal.SIGINT)
        # Ends when the last process that could write there has ended.
        assert process.stderr.read() == "aioserve: interrupted\n"
        assert process.wait() == 130


@pytest.mark.parametrize(
    "words", [["compare", FCFS, *SMALL, "--seeds", "1"], ["--help"]], ids=["compare", "help"]
)
def test_a_reader_that_has_read_enough_ends_it_quietly(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)  # as `head` does when it has enough
    try:
        with processes.started(
            *(sys.executable, "-m", "aioserve", *words), stdout=write, stderr=subprocess.PIPE
        ) as process:
            assert process.stderr is not None
            assert process.stderr.read() == ""
            assert process.wait() == 141
    finally:
        os.close(write)


def test_every_default_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command, texts in {
        "compare": ["--time-scale X", "(default: 1.0)", "(default: 0)", "(default: all)"],
        "search": ["(default: 0.99)", "(default: 0.02)"],
        "sweep": ["several values separated by commas"],
        "bench": ["(default: 2000)", "(default: 600.0)", "(default: completions)"],
    }.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        printed = " ".join(capsys.readouterr().out.split())
        for text in texts:
            assert text in printed, (command, text)


def test_make_ab_compares_the_three_main_policies() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make")
    printed = subprocess.run([make, "-n", "ab"], capture_output=True, text=True, cwd=ROOT).stdout
    assert "compare fcfs chunked_prefill priority --workload mixed" in printed
