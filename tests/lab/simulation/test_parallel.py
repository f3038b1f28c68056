"""Simulated runs in processes of their own give what they give in this one."""

import pytest

from aioserve.cli.main import main as command
from aioserve.config import EngineConfig
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.document import compare, encode
from aioserve.lab.simulation import parallel
from aioserve.lab.simulation.fleet_replicas import FleetOutcome
from aioserve.lab.simulation.parallel import choose_num_jobs, simulate_all
from aioserve.lab.simulation.run import simulate, simulated
from aioserve.lab.workloads.synthetic import WorkloadSource

MIXED = "configs/workloads/mixed.yaml"
CONFIGS = ["configs/fcfs.yaml", "configs/chunked_prefill.yaml"]


def test_the_document_is_the_same_byte_for_byte() -> None:
    candidates = [Candidate(path, EngineConfig.load(path)) for path in CONFIGS]
    workloads = [WorkloadSource(path=MIXED, limit=12).load(seed) for seed in range(2)]
    counts: list[int] = []
    alone = compare(candidates, workloads)
    spread = compare(candidates, workloads, num_jobs=2, progress=counts.append)
    assert encode(spread) == encode(alone)
    assert counts == [12] * 4


@pytest.mark.parametrize(
    ("settings", "is_one"),
    [
        ([], True),
        ([("runner.profile", "h100-llama-3.1-8b")], True),
        ([("runner.step_jitter", 0.1)], False),
    ],
    ids=str,
)
def test_a_long_run_of_an_engine_is_that_of_a_fleet_of_one(
    settings: list[tuple[str, object]], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = WorkloadSource(path=MIXED, limit=40).load(0)
    config = simulated(EngineConfig.load(CONFIGS[1], settings), workload.longest)
    monkeypatch.setattr(parallel, "REQUESTS_WORTH_A_FLEET", 40)
    [found] = simulate_all([(config, workload, None)], 1, lambda count: None)
    assert isinstance(found, FleetOutcome) is is_one
    alone = simulate(config, workload)
    assert vars(found.steps) == vars(alone.steps)
    for one, other in zip(found.requests, alone.requests, strict=True):
        assert all(getattr(one, name) == getattr(other, name) for name in other.__slots__)
    monkeypatch.setattr(parallel, "REQUESTS_WORTH_A_FLEET", 41)
    [short] = simulate_all([(config, workload, None)], 1, lambda count: None)
    assert not isinstance(short, FleetOutcome)


def test_little_work_is_not_worth_a_process() -> None:
    workload = WorkloadSource(path=MIXED, limit=40).load(0)
    assert choose_num_jobs([workload], 2) == 1
    assert choose_num_jobs([workload] * 1000, 2) >= 1


def test_no_processes_at_all_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *CONFIGS, "--workload", MIXED, "--limit", "5", "--jobs", "0"]
    assert command(words) != 0
    assert "--jobs must be at least 1, got 0" in capsys.readouterr().err
