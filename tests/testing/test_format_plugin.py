"""`pytest --aioserve-format ...` as a stranger runs it: in a folder of their own, nothing else."""

import re
import sys
from pathlib import Path

import pytest

from tests import processes

MINE = """
from aioserve.features.formats.marked_json import HermesParser


class Good(HermesParser):
    pass


class Bad(HermesParser):
    def give_back(self):
        self.held = None
"""


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "mine.py").write_text(MINE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--aioserve-examples=5"]
    command += ["-p", "no:schemathesis"]
    result = processes.run(*command, *arguments, cwd=folder)
    return result.returncode, result.stdout + result.stderr


def test_a_sound_format_passes_by_its_file_and_by_its_name(tmp_path: Path) -> None:
    code, output = run_pytest(
        tmp_path, "--aioserve-format=mine.py:Good", "--aioserve-format=mistral", "-v"
    )
    assert code == 0, output
    assert "test_what_is_written_is_read_back[mine.py:Good] PASSED" in output
    assert "test_what_is_written_is_read_back[mistral] PASSED" in output


def test_a_broken_format_fails_on_a_screen_with_the_text(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "--aioserve-format=mine:Bad")
    assert code == 1, output
    assert "Bad loses or changes text that is no call: it reads" in output
    assert """The text, in 1 pieces: ['<tool_call>{"a": 1}kept0kept']""" in output
    assert re.search(r"1 failed, .*\d skipped", output), output
    assert len(output.splitlines()) <= 30, output


def test_an_unknown_format_is_a_usage_error(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "--aioserve-format=hermse")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--aioserve-format: unknown format 'hermse' (did you mean 'hermes'?)" in output


@pytest.mark.slow
def test_a_policy_and_a_format_can_be_tested_in_one_run(tmp_path: Path) -> None:
    code, output = run_pytest(
        tmp_path, "--aioserve-format=hermes", "--aioserve-policy=fcfs", "-v", "-k", "cut or leaves"
    )
    assert code == 0, output
    assert "[hermes] PASSED" in output
    assert "[fcfs-1] PASSED" in output
