"""`pytest --aioserve-policy ...` as a stranger runs it: in a folder of their own, nothing else."""

import re
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.slow import mostly_slow

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


class Raises(Good):
    def order(self, request):
        return request.prioriti
"""


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    """In `folder`, with few random traffics."""
    (folder / "mine.py").write_text(GOOD)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--aioserve-examples=3"]
    command += ["-p", "no:schemathesis"]  # imports a lot, and says nothing here
    result = processes.run(*command, *arguments, cwd=folder)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
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
    assert re.search(
        r"fcfs: its slowest schedule\(\) took [\d.]+ ms here, with \d+ requests", output
    )


@pytest.mark.parametrize("spec", mostly_slow(["mine:Bad", "mine.py:Bad"], but=["mine:Bad"]))
def test_a_broken_policy_fails_on_a_screen_with_a_program_that_shows_it(
    tmp_path: Path, spec: str
) -> None:
    code, output = run_pytest(tmp_path, f"--aioserve-policy={spec}")
    assert code == 1, output
    assert "finish_requests must return a list of the ids that ended, got None" in output
    assert re.search(r"1 failed, .*\b[345]\d skipped", output), output[
        -700:
    ]  # the same would be said again and again
    assert len(output.splitlines()) <= 40, output
    program = output.split("To reproduce:")[1].split("====")[0]
    result = processes.run(sys.executable, "-c", program, cwd=tmp_path)
    assert "finish_requests must return a list" in result.stderr


def test_the_line_of_the_policy_is_shown(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, "--aioserve-policy=mine:Raises")
    assert "'Request' object has no attribute 'prioriti'" in output
    assert re.search(r"in mine.py:\d+, order\(\): return request.prioriti\n", output), output


@pytest.mark.slow
def test_maxfail_goes_on_after_the_first_broken_rule(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, "--aioserve-policy=mine:Bad", "--maxfail=2")
    assert "2 failed" in output


@pytest.mark.slow
def test_a_contract_in_a_file_of_ones_own_is_told_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(
        "from aioserve.testing.contract import PolicyContract\n"
        "from mine import Bad\n"
        "class TestBad(PolicyContract):\n"
        "    policy = Bad\n"
        "    max_examples = 3\n"
    )
    code, output = run_pytest(tmp_path, "test_bad.py", "-k", "leaves")
    assert code == 1
    assert "To reproduce:" in output
    assert "with subject.harness(" not in output
    assert "2 failed" in output


@pytest.mark.slow
def test_options_reach_the_policy_and_wrong_ones_are_named(tmp_path: Path) -> None:
    arguments = ("--aioserve-policy=mine:Good", "--aioserve-policy-options")
    assert run_pytest(tmp_path, *arguments, '{"most": 5}')[0] == 0
    for options, message in (
        ('{"moist": 5}', "moist"),
        ("[5]", "a JSON object is needed"),
    ):
        code, output = run_pytest(tmp_path, *arguments, options)
        assert code == pytest.ExitCode.USAGE_ERROR
        assert message in output


def test_an_unknown_policy_is_a_usage_error(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "--aioserve-policy=fcsf")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "unknown policy 'fcsf'" in output


@pytest.mark.slow
def test_the_contract_runs_alone_unless_other_tests_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    for arguments, count in (
        ([], 0),
        (["test_own.py"], 1),
        (["--pyargs", "aioserve.testing.contract", "test_own.py"], 1),
    ):
        code, output = run_pytest(tmp_path, "--aioserve-policy=mine:Good", "-v", *arguments)
        assert code == 0, output
        assert output.count("test_own PASSED") == count
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
