"""`python -m aioserve check`: the contract of policies where only a server was installed."""

import importlib.util
import sys
from pathlib import Path

import pytest

from aioserve.cli.main import main
from tests import processes
from tests.testing.test_plugin import FORMATS, GOOD, assert_told_on_a_screen


def check(folder: Path, *words: str, mine: str = GOOD) -> tuple[int, str]:
    """In `folder`, beside a project whose pytest would do something else."""
    (folder / "mine.py").write_text(mine)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-flag\n")
    (folder / "tests").mkdir()
    (folder / "tests/conftest.py").write_text("def pytest_of_a_plugin_that_is_off(): ...\n")
    done = processes.run(sys.executable, "-m", "aioserve", "check", *words, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_a_broken_policy_is_told_on_a_screen_with_a_program_and_exit_code_1(
    tmp_path: Path,
) -> None:
    code, output = check(tmp_path, "mine.py:Bad", "--examples", "3")
    assert code == 1, output
    assert_told_on_a_screen(output, tmp_path)
    assert "all: check --all, pytest" in output
    assert "::" not in output  # no path of pytest's, through a folder that is gone


@pytest.mark.slow
def test_a_sound_policy_is_exit_code_0(tmp_path: Path) -> None:
    words = ("mine.py:Good", "--examples", "3", "--options", '{"most": 64}')
    code, output = check(tmp_path, *words)
    assert code == 0, output
    assert "mine.py:Good: its slowest schedule() took" in output


@pytest.mark.slow
def test_a_format_of_replies_has_its_own_contract(tmp_path: Path) -> None:
    words = ("--kind", "format", "--examples", "20")
    code, output = check(tmp_path, "mine:Bad", *words, mine=FORMATS)
    assert code == 1, output
    assert "Bad loses or changes text that is no call" in output


def test_what_cannot_be_checked_is_said_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = check(tmp_path, "fcsf")
    assert code == 1
    assert "unknown policy 'fcsf' (did you mean 'fcfs'?)" in output
    code = main(["check", "fcfs", "--kind", "format", "--options", "{}"])
    assert (code, capsys.readouterr().err) == (2, "aioserve: error: --options: a format has none\n")
    assert main(["check", "least_work", "--kind", "router", "--examples", "5"]) == 2
    assert (
        "--examples is for policy and format: the contract of kind router"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["pytest", "hypothesis"])
def test_without_what_it_needs_one_sentence_names_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == name else found(n))
    assert main(["check", "fcfs"]) == 2
    said = "the contract needs pytest and hypothesis: pip install pytest hypothesis\n"
    assert capsys.readouterr().err == f"aioserve: error: {said}"
