"""What is said of the machine is sane, and what a container allows."""

from pathlib import Path

import pytest

from aioserve.runner.cpu import machine


def test_machine_answers_are_sane() -> None:
    assert 1 <= machine.default_num_threads() <= 4096
    assert machine.available_memory() > 1 << 20
    assert isinstance(machine.has_native_bf16(), bool)


def test_container_limits_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, text in {
        "cpu.max": "150000 100000",
        "memory.max": "5000",
        "memory.current": "3000",
    }.items():
        (tmp_path / name).write_text(text)
    assert machine.default_num_threads() == 1
    assert machine.available_memory() == 2000
    (tmp_path / "memory.max").write_text("max")
    assert machine.available_memory() > 2000


@pytest.mark.parametrize(("asked", "given"), [("2", 2), ("99", 3), ("", 3), ("2,1", 2)])
def test_no_more_threads_than_openmp_was_told(
    asked: str, given: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CPU_TOPOLOGY", f"{tmp_path}/{{}}")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert machine.default_num_threads() == given
