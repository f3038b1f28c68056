"""The workflows for forges run what this repository has, and their linter finds nothing."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import processes

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_is_a_target_of_the_makefile(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = [step["run"] for step in steps(path) if "run" in step]
    assert commands
    for command in commands:
        target = re.fullmatch(r"make ([a-z-]+)", command)
        assert target, command
        assert re.search(rf"^{target[1]}:", makefile, re.M), command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_the_repository(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_the_linter_of_workflows_finds_nothing(path: Path) -> None:
    if (actionlint := shutil.which("actionlint")) is None:
        pytest.skip("no actionlint (https://github.com/rhysd/actionlint)")
    done = processes.run(actionlint, "-shellcheck=", "-pyflakes=", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
