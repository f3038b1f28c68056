"""`pytest --aioserve-policy ...` as a stranger runs it: in a folder of their own, nothing else."""

import sys
from pathlib import Path

import pytest

from tests import processes

GOOD = """
from aioserve.scheduler import BaseScheduler, PolicyOptions, PositiveInt


class Good(BaseScheduler):
    class Options(PolicyOptions):
        most: PositiveInt = 100

    def schedule(self):
        step = self.new_step(self.options.most)
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


class Bad(Good):
    def finish_requests(self, request_ids, finished_status):
        super().finish_requests(request_ids, finished_status)
"""


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    """In `folder`, with few random traffics."""
    (folder / "mine.py").write_text(GOOD)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--aioserve-examples=3"]
    result = processes.run(*command, *arguments, cwd=folder)
    return result.returncode, result.stdout + result.stderr


def test_a_sound_policy_passes_in_an_empty_folder_whatever_it_is_called(tmp_path: Path) -> None:
    code, output = run_pytest(
        tmp_path,
        "--aioserve-policy=fcfs",
        "--aioserve-policy=mine:Good",
        f"--aioserve-policy={tmp_path / 'mine.py'}:Good",
        "-v",
    )
    assert code == 0, output
    assert output.count("test_no_rule_is_broken_under_random_traffic") == 3 * 2
    assert "[fcfs-1] PASSED" in output
    assert "[mine:Good-2] PASSED" in output


def test_a_broken_policy_fails_with_the_rule_and_a_program_that_reproduces_it(
    tmp_path: Path,
) -> None:
    code, output = run_pytest(tmp_path, "--aioserve-policy=mine:Bad")
    assert code == 1, output
    assert "finish_requests must return a list of the ids that ended, got None" in output
    assert "To reproduce:" in output
    assert "harness = SchedulerHarness(Bad, " in output


def test_options_reach_the_policy_and_wrong_ones_are_named(tmp_path: Path) -> None:
    arguments = ("--aioserve-policy=mine:Good", "--aioserve-policy-options")
    assert run_pytest(tmp_path, *arguments, '{"most": 5}')[0] == 0
    code, output = run_pytest(tmp_path, *arguments, '{"moist": 5}')
    assert code == 1
    assert "moist`; options it has: most" in output
    code, output = run_pytest(tmp_path, *arguments, "[5]")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "a JSON object is needed" in output


def test_an_unknown_policy_is_a_usage_error(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "--aioserve-policy=fcsf")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "unknown policy 'fcsf'; available:" in output


def test_tests_of_the_folder_run_as_well_and_the_contract_only_once(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    for arguments in (
        [],
        ["test_own.py"],
        ["--pyargs", "aioserve.testing.contract", "test_own.py"],
    ):
        code, output = run_pytest(tmp_path, "--aioserve-policy=mine:Good", "-v", *arguments)
        assert code == 0, output
        assert output.count("test_own PASSED") == 1
        assert output.count("random_traffic") == 2


def test_without_the_option_the_plugin_loads_nothing_and_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\n"
        "def test_own():\n"
        "    heavy = ('aioserve.scheduler', 'aioserve.engine', 'torch')\n"
        "    assert [name for name in heavy if name in sys.modules] == []\n"
    )
    code, output = run_pytest(tmp_path, "-v")
    assert code == 0, output
    assert "1 passed" in output
