"""A decision log as a workload: the same traffic for any configurations."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from aioserve.cli.main import main as command
from aioserve.config import EngineConfig, RunnerConfig, SchedulerConfig
from aioserve.lab.comparison.document import measure_recorded
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.simulation.run import simulate
from aioserve.lab.what_if import Traffic, make_settings, make_workload, read_traffic
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, build_prompt
from tests.lab.traffic import record

VOCAB_SIZE = 2048


@pytest.fixture
def traffic(tmp_path: Path) -> Traffic:
    record(tmp_path / "log", num_requests=60)
    return read_traffic(DecisionLog(tmp_path / "log"))


def test_requests_come_as_they_came(traffic: Traffic) -> None:
    workload = make_workload(traffic, "log")
    lives = sorted(traffic.lives, key=lambda life: life.arrival)
    assert len(workload.requests) == len(lives) > 30
    for request, life in zip(workload.requests, lives, strict=True):
        assert request.arrival == pytest.approx(life.arrival - lives[0].arrival)
        assert request.num_prompt_tokens == life.num_prompt_tokens
        assert request.output_tokens == max(len(life.tokens), 1)
        assert (request.priority, request.user) == (life.spec.priority, life.spec.user)


def test_prompts_share_the_blocks_that_they_shared(traffic: Traffic) -> None:
    workload = make_workload(traffic, "log")
    lives = sorted(traffic.lives, key=lambda life: life.arrival)
    prompts = [build_prompt(r, VOCAB_SIZE, {}) for r in workload.requests]

    def shared(a: list[int], b: list[int]) -> int:
        both = zip(a, b, strict=False)
        return next((i for i, (x, y) in enumerate(both) if x != y), min(len(a), len(b))) // 16

    found = 0
    for i, life in enumerate(lives):
        for j, other in enumerate(lives[:i]):
            assert life.prompt is not None
            assert other.prompt is not None
            expected = shared(life.prompt.tolist(), other.prompt.tolist())
            assert shared(prompts[i], prompts[j]) == expected, (i, j)
            found += expected
    assert found > 0


def test_the_machine_of_the_log_is_simulated(traffic: Traffic) -> None:
    settings = dict(make_settings(traffic))
    assert settings["cache.num_kv_blocks"] == traffic.header.num_kv_blocks
    assert settings["runner.step_base_ms"] == pytest.approx(4.0, rel=0.05)


def test_the_limits_of_the_recorded_scheduler_hold_where_a_configuration_states_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log of a server with six seats is compared with six, unless a file says otherwise."""
    log = tmp_path / "log"
    record(log, num_requests=60)
    more = tmp_path / "more.yaml"
    more.write_text("scheduler: {policy: fcfs, max_num_seqs: 3}")
    out = tmp_path / "c.json"
    words = ["compare", "fcfs", "chunked_prefill", str(more), "--replay", str(log)]
    assert command([*words, "--json", str(out)]) == 0
    results = json.loads(out.read_text())["results"]
    assert [r["settings"]["scheduler"]["max_num_seqs"] for r in results] == [6, 6, 3]
    assert "Simulated, chunked_prefill is off by" in capsys.readouterr().out


def test_drafts_of_a_log_are_as_good_in_the_workload(tmp_path: Path) -> None:
    requests = [
        WorkloadRequest(float(i), (Piece(i, 40),), 100, draft_acceptance=0.9 if i % 2 else 0.2)
        for i in range(20)
    ]
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated", simulated_draft_tokens=2),
        scheduler=SchedulerConfig(decision_log=str(tmp_path / "log")),
    )
    simulate(config, Workload("test", tuple(requests)))
    traffic = read_traffic(DecisionLog(tmp_path / "log"))
    assert dict(make_settings(traffic))["runner.simulated_draft_tokens"] == 2
    found = [r.draft_acceptance for r in make_workload(traffic, "log").requests]
    for share, request in zip(found, requests, strict=True):
        assert share == pytest.approx(request.draft_acceptance, abs=0.25)


@pytest.mark.parametrize(("num_drafts", "expected"), [(0, None), (2, 0.0)])
def test_a_request_without_drafts_says_that_they_fail_where_others_had_some(
    num_drafts: int, expected: float | None, tmp_path: Path
) -> None:
    """A log without drafts says nothing about them."""
    requests = [
        WorkloadRequest(0.0, (Piece(0, 40),), 1),
        WorkloadRequest(1.0, (Piece(1, 40),), 50),
    ]
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated", simulated_draft_tokens=num_drafts),
        scheduler=SchedulerConfig(decision_log=str(tmp_path / "log")),
    )
    simulate(config, Workload("test", tuple(requests)))
    workload = make_workload(read_traffic(DecisionLog(tmp_path / "log")), "log")
    assert workload.requests[0].draft_acceptance == expected


def test_compare_takes_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, result = tmp_path / "log", tmp_path / "result.json"
    record(log, num_requests=60)
    configs = ["configs/fcfs.yaml", "configs/chunked_prefill.yaml"]
    assert command(["compare", *configs, "--replay", str(log), "--json", str(result)]) == 0
    assert "step times fitted to" in capsys.readouterr().out
    document = json.loads(result.read_bytes())
    assert document["workload"]["name"] == "log"
    sizes = {r["settings"]["cache"]["num_kv_blocks"] for r in document["results"]}
    assert sizes == {DecisionLog(log).header.num_kv_blocks}


def test_what_was_measured_stands_beside_what_is_simulated(
    traffic: Traffic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = measure_recorded(traffic)
    times = [life.token_times for life in traffic.lives]
    first_tokens = sorted(
        life.token_times[0] - life.arrival for life in traffic.lives if life.token_times
    )
    assert recorded["durations"]["ttft"]["max"] == pytest.approx(first_tokens[-1], rel=1e-5)
    assert recorded["durations"]["ttft"]["mean"] == pytest.approx(
        sum(first_tokens) / len(first_tokens), rel=1e-5
    )
    gaps = [b - a for t in times for a, b in pairwise(t)]
    assert recorded["durations"]["gap"]["max"] == pytest.approx(max(gaps), rel=1e-5)
    assert 0 < recorded["finished"] <= recorded["requests"] == len(traffic.lives)
    log, page = tmp_path / "log", tmp_path / "page.html"
    words = ["compare", "fcfs", "chunked_prefill", "--replay", str(log)]
    assert command([*words, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    row = next(
        line for line in out.splitlines() if line.startswith("TTFT max") or "gap max" in line
    )
    assert f" {1e3 * max(gaps):.1f} " in row
    assert "Recorded is what the server measured under" in out
    assert '"has_recorded":true' in page.read_text()
    assert command([*words, "--limit", "20"]) == 0  # these are not the requests of the log
    assert "recorded " not in capsys.readouterr().out.split("TTFT")[0]


def test_requests_come_from_one_place_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "configs/fcfs.yaml", "--replay", "log", "--workload", "mixed.yaml"]
    with pytest.raises(SystemExit):
        command(words)
    assert "not allowed with" in capsys.readouterr().err
