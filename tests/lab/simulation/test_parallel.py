"""Simulated runs in processes of their own give what they give in this one."""

import pytest

from aioserve.cli.main import main as command
from aioserve.config import EngineConfig
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.document import compare, encode
from aioserve.lab.simulation.parallel import choose_num_jobs
from aioserve.lab.workloads.synthetic import WorkloadSource

MIXED = "configs/workloads/mixed.yaml"
CONFIGS = ["configs/fcfs.yaml", "configs/chunked_prefill.yaml"]


def test_the_document_is_the_same_byte_for_byte() -> None:
    candidates = [Candidate(path, EngineConfig.load(path)) for path in CONFIGS]
    workloads = [WorkloadSource(path=MIXED, limit=40).load(seed) for seed in range(2)]
    counts: list[int] = []
    alone = compare(candidates, workloads)
    spread = compare(candidates, workloads, num_jobs=2, progress=counts.append)
    assert encode(spread) == encode(alone)
    assert counts == [40] * 4


def test_little_work_is_not_worth_a_process() -> None:
    workload = WorkloadSource(path=MIXED, limit=40).load(0)
    assert choose_num_jobs([workload], 2) == 1
    assert choose_num_jobs([workload] * 1000, 2) >= 1


def test_no_processes_at_all_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *CONFIGS, "--workload", MIXED, "--limit", "5", "--jobs", "0"]
    assert command(words) != 0
    assert "--jobs must be at least 1, got 0" in capsys.readouterr().err
