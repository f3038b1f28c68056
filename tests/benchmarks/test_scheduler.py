"""The benchmark of the scheduler does its work under every policy, and compares two checkouts."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from against import checkout
from harness import ROOT
from scheduler import POLICIES, Case, SchedulerWork, usual_users

from tests.processes import run
from tests.slow import mostly_slow


@pytest.mark.parametrize("policy", mostly_slow(POLICIES, but=["fcfs", "fair", "mlfq"]))
def test_every_policy_is_measured_in_what_the_names_of_cases_say(policy: str) -> None:
    steady = SchedulerWork(Case(policy, "steady", 8, waiting=20))
    assert [step.rows for step in steady.steps(20)] == [8] * 20
    churn = SchedulerWork(Case(policy, "churn", 8, waiting=20, users=20))
    churn.steps(100)
    assert churn.num_ended >= 90
    bursts = SchedulerWork(Case(policy, "bursts", 8, waiting=20))
    bursts.steps(3)
    assert bursts.num_ended >= 3 * 16
    assert bursts.num_preempted > 0


@pytest.mark.parametrize("policy", mostly_slow(POLICIES, but=["deadline"]))
def test_bursts_to_a_single_seat_have_blocks_for_every_request(policy: str) -> None:
    work = SchedulerWork(Case(policy, "bursts", 1, waiting=70))
    work.steps(40)
    assert work.num_ended >= 80


def test_fair_is_measured_with_as_many_clients_as_requests() -> None:
    assert usual_users("fair", 10_000) == [100, 10_000]
    assert usual_users("mlfq", 10_000) == [100]
    work = SchedulerWork(Case("fair", "churn", 8, waiting=300, users=300))
    work.steps(10)
    assert len({request.user for request in work.scheduler.get_requests()}) > 250


def test_the_same_case_is_the_same_work_every_time() -> None:
    case = Case("mlfq", "bursts", 8, waiting=20)
    checks = [SchedulerWork(case).round(2)[1] for _ in range(2)]
    assert checks[0] == checks[1]


def compare(other: Path, tolerance: float, *cases: str) -> tuple[int, str]:
    result = run(
        *(sys.executable, "benchmarks/scheduler.py", "--against", str(other)),
        *("--policy", "fcfs", "--case", *cases, "--running", "4", "--waiting", "0"),
        *("--starts", "1", "--rounds", "2", f"--tolerance={tolerance}"),
    )
    assert result.stdout, result.stderr
    return result.returncode, result.stdout


def copy_of_this_one(folder: Path) -> Path:
    for name in ("aioserve", "policies"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    return folder


@pytest.mark.slow
def test_another_checkout_is_run_with_its_own_scheduler_and_policies(tmp_path: Path) -> None:
    other = copy_of_this_one(tmp_path)
    code, text = compare(other, 1000, "bursts", "engine")
    assert code == 0
    assert re.findall(r"^fcfs (\w+) 4 run", text, re.MULTILINE) == ["bursts", "engine"]
    assert "not the same work" not in text
    assert [row["is_same_work"] for row in json.loads(text.splitlines()[-1])["rows"]] == [
        True,
        True,
    ]
    policy = other / "policies/fcfs.py"
    policy.write_text(policy.read_text().replace("self.new_step()", "self.new_step(250)"))
    _, text = compare(other, 1000, "bursts")
    assert "not the same work" in text


def test_what_is_slower_than_is_tolerated_is_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    code, text = compare(copy_of_this_one(tmp_path), -0.99, "bursts")
    assert code == 1
    assert "slower by more than -99%: fcfs bursts 4 run" in text


def test_what_is_neither_directory_nor_revision_is_refused() -> None:
    with (
        pytest.raises(SystemExit, match="nonsense is no directory and no revision"),
        checkout("nonsense"),
    ):
        pass
