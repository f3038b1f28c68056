"""The same traffic under another policy: true to the log where nothing is changed."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve.cli.main import main as command
from aioserve.errors import ConfigError
from aioserve.kv_cache.resource import WindowSpec
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.recorder import LogWriter
from aioserve.lab.simulation.run import simulate
from aioserve.lab.what_if import make_config, percentile, what_if
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from tests.lab import traffic
from tests.lab.traffic import record

# Refused requests are left out, and one preemption more or less makes the longest gap.
CHAOTIC = ("refused", "gap max ms")


@pytest.mark.parametrize("depth", [1, 2])
def test_the_recorded_policy_simulated_does_what_it_did(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path, pipeline_depth=depth, num_requests=150, policy="chunked_prefill")
    result = what_if(DecisionLog(path), "priority", [])
    recorded = {name: real for name, real in result.recorded.items() if name not in CHAOTIC}
    for name, real in recorded.items():
        assert result.same[name] == pytest.approx(real, rel=0.1, abs=5), name
    assert result.other != result.same
    assert result.recorded["preemptions"] > 0
    assert result.step_time.base_ms == pytest.approx(4.0, rel=0.05)
    assert result.step_time.prefill_token_us == pytest.approx(50.0, rel=0.05)


def test_switches_of_the_policy_are_simulated_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    switches: list[tuple[float, str, dict[str, Any]]] = [
        (0.3, "priority", {}),
        (0.4, "chunked_prefill", {"chunk_sise": 64}),  # refused
        (0.5, "chunked_prefill", {"chunk_size": 64}),
    ]
    record(path, num_requests=150, policy="fcfs", switches=switches)
    result = what_if(DecisionLog(path), None, [])
    for name, real in result.recorded.items():
        if name not in CHAOTIC:
            assert result.same[name] == pytest.approx(real, rel=0.1, abs=5), name
    assert result.other == result.same
    named = "fcfs, then priority from 0.3 s, then chunked_prefill from 0.5 s"
    assert command(["replay", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{named}: ")
    assert command(["replay", str(path), "--set", "scheduler.max_num_seqs=2"]) == 0
    out = capsys.readouterr().out
    assert f"recorded, simulated: {named}; what if: {named} with scheduler.max_num_seqs=2" in out
    other = what_if(DecisionLog(path), "fcfs", [])  # without switches
    assert other.same == result.same != other.other
    assert command(["replay", str(path), "--set", "scheduler.options.chunk_size=32"]) == 2
    assert "FCFSScheduler" in capsys.readouterr().err  # it has no such option


def test_a_log_of_another_engines_scheduler_is_read_where_that_engine_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "theirs.log", tmp_path / "result.json"
    record(tmp_path / "log", num_requests=80, policy="fcfs")
    log, writer = DecisionLog(tmp_path / "log"), LogWriter(path)
    theirs = {**log.header.scheduler, "policy": "vllm"}
    for entry in (msgspec.structs.replace(log.header, scheduler=theirs), *log):
        writer.write(entry)
    writer.close()
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    monkeypatch.delitem(sys.modules, "aioserve.vllm.foreign", raising=False)
    found = what_if(DecisionLog(path), "priority", [])
    assert found.policies == "vllm"
    assert found.same is None
    assert found.other["requests served"] > 0
    assert command(["replay", str(path), "--policy", "priority"]) == 0
    out = capsys.readouterr().out
    assert "vllm is the scheduler of another engine, which is not installed here" in out
    words = ["compare", "priority", "--replay", str(path), "--json", str(result)]
    assert command(words) == 0
    assert json.loads(result.read_bytes())["recorded"]["policies"] == "vllm"
    assert command(["calibrate", "--log", str(path)]) == 0
    assert command(["replay", str(path)]) == 2  # its own decisions need that scheduler
    assert "pip install vllm" in capsys.readouterr().err


def test_compare_says_the_same_where_nobody_leaves_and_no_reply_is_asked_back(
    tmp_path: Path,
) -> None:
    log, result = tmp_path / "log", tmp_path / "result.json"
    requests = [
        WorkloadRequest(0.01 * i, (Piece(i, 10 + 7 * i % 50),), 5 + i % 35, priority=i % 3)
        for i in range(80)
    ]
    simulate(traffic.make_config(log, policy="fcfs"), Workload("plain", tuple(requests)))
    other = what_if(DecisionLog(log), "priority", []).other
    words = ["--set", "scheduler.max_num_seqs=6", "--json", str(result)]
    assert command(["compare", "priority", "--replay", str(log), *words]) == 0
    durations = json.loads(result.read_bytes())["results"][0]["durations"]
    for name, measure, statistic in (
        ("TTFT mean ms", "ttft", "mean"),
        ("TTFT p99 ms", "ttft", "p99"),
        ("gap max ms", "gap", "max"),
        ("e2e p99 ms", "e2e", "p99"),
    ):
        assert 1e3 * durations[measure][statistic] == pytest.approx(other[name], rel=1e-4), name
    assert other["preemptions"] > 0


@pytest.mark.slow
def test_real_time_is_simulated_roughly(tmp_path: Path) -> None:
    """Only roughly, and in one of some runs: a shared test machine stalls as it likes."""
    found = []
    for attempt in range(5):
        path = tmp_path / f"log{attempt}"
        record(path, loop_factory=asyncio.new_event_loop, num_requests=100, seconds=1.0)
        result = what_if(DecisionLog(path), "fcfs", [])
        names = "TTFT mean ms", "tokens/s"
        found.append([result.same[name] / result.recorded[name] for name in names])
        if found[-1] == pytest.approx([1, 1], abs=0.4):
            return
    pytest.fail(f"simulated over recorded, of TTFT and throughput: {found}")


def test_a_result_is_the_same_every_time(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path)
    log = DecisionLog(path)
    assert what_if(log, "fcfs", []) == what_if(log, "fcfs", [])


def test_settings_are_laid_over_the_recorded_ones(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path, num_requests=5, policy="chunked_prefill", options={"chunk_size": 64})
    header = DecisionLog(path).header
    same = make_config(header, None, [("scheduler.options.chunk_size", "32")])
    assert same.scheduler.options == {"chunk_size": 32}
    assert (same.scheduler.max_num_seqs, same.cache.num_kv_blocks) == (6, 24)
    assert make_config(header, "fcfs", []).scheduler.options == {}  # of another policy
    with pytest.raises(ConfigError, match=r"server\.port plays no part"):
        make_config(header, None, [("server.port", "1")])


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    record(path)
    assert command(["replay", str(path), "--set", "scheduler.max_num_seqs=2"]) == 0
    table, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "TTFT p50 ms" in table
    assert "relative error" in table
    result = json.loads(last)
    assert result["what_if"]["TTFT mean ms"] > result["simulated"]["TTFT mean ms"]


def test_bad_settings_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    record(path, num_requests=20)
    for argv, message in (
        (["--policy", "fcsf"], "unknown policy 'fcsf'"),
        (["--policy", "fcfs", "--set", "scheduler.options.chunk_size=3"], "chunk_size"),
        (["--set", "scheduler.max_num_seqs=none"], "max_num_seqs"),
    ):
        assert command(["replay", str(path), *argv]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], p) for p in (0.0, 0.5, 0.99, 1.0)] == [1, 2, 4, 4]
    assert percentile([], 0.5) == 0


def test_a_pool_of_windows_is_replayed_and_is_left_out_where_the_setting_is_zero(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    record(path, num_requests=40)
    without, log = DecisionLog(path), DecisionLog(path)
    windows = WindowSpec(num_tokens=32, num_blocks=8, max_chunk=64, max_drafts=0)
    log.header = msgspec.structs.replace(log.header, windows=windows)
    plain = what_if(without, "fcfs", [])
    assert what_if(log, "fcfs", []).other != plain.other
    assert what_if(log, "fcfs", [("cache.num_window_blocks", "0")]).other == plain.other
