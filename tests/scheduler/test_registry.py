"""Policies are found by name, module or file; what is wrong with a name is said."""

import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.errors import ConfigError, UnknownPolicyError
from aioserve.scheduler import available_policies, load_policy

POLICY_FILE = """
from aioserve.scheduler import BaseScheduler
class Mine(BaseScheduler):
    def schedule(self):
        return self.new_step().output()
class Unfinished(BaseScheduler):
    pass
"""


def test_the_built_in_policies_are_installed_and_loadable() -> None:
    assert {"chunked_prefill", "fcfs", "priority"} <= available_policies().keys()
    for name in available_policies():
        assert load_policy(name).schedule


def test_a_policy_can_be_a_module_and_class() -> None:
    assert load_policy("aioserve.policies.fcfs:FCFSScheduler") is load_policy("fcfs")


def test_a_policy_can_be_a_file_and_class(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE)
    assert load_policy(f"{path}:Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fcsf", r"unknown policy 'fcsf'; available: .*fcfs.*; or give package.module:Class"),
        ("aioserve.policies.fcfs:Nope", "no 'Nope' in aioserve.policies.fcfs"),
        ("aioserve.policies.nope:Nope", "no module named 'aioserve.policies.nope'"),
        ("nowhere/file.py:Class", "no file nowhere/file.py"),
    ],
)
def test_an_unknown_policy_is_named(spec: str, message: str) -> None:
    with pytest.raises(UnknownPolicyError, match=message):
        load_policy(spec)


def test_a_class_that_is_no_scheduler_or_not_finished_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE)
    with pytest.raises(ConfigError, match="not a SchedulerInterface"):
        load_policy("pathlib:Path")
    with pytest.raises(ConfigError, match="does not implement schedule"):
        load_policy(f"{path}:Unfinished")


def test_an_error_inside_a_policy_module_is_not_masked(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import a_module_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_policy(f"{path}:Mine")


def test_a_package_called_policies_in_the_working_directory_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/__init__.py").write_text("raise ImportError('this one is not ours')")
    code = "from aioserve.scheduler import *; print(*map(load_policy, available_policies()))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "aioserve.policies.fcfs.FCFSScheduler" in result.stdout


@pytest.mark.parametrize("name", sorted(available_policies()))
def test_importing_a_policy_loads_neither_torch_nor_engine_nor_server(name: str) -> None:
    code = (
        "import sys; from aioserve.scheduler import load_policy; load_policy(sys.argv[1]);"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'aiohttp')"
        " or m.startswith(('aioserve.engine', 'aioserve.server', 'asyncio'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
