"""The workflows for forges run what this repository has, and linters find nothing in them."""

import re
import shutil
import sys
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


def test_every_workflow_keeps_to_the_schema_of_workflows(tmp_path: Path) -> None:
    """By the schema that comes with check-jsonschema, so that nothing is fetched."""
    linter = Path(sys.executable).with_name("check-jsonschema")
    if not linter.exists():
        pytest.skip("no check-jsonschema: make test-deploy installs it")
    command = (str(linter), "--builtin-schema", "vendor.github-workflows")
    done = processes.run(*command, *map(str, WORKFLOWS))
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert processes.run(*command, str(wrong)).returncode == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actionlint_finds_nothing_where_it_is_installed(path: Path) -> None:
    if (actionlint := shutil.which("actionlint")) is None:
        pytest.skip("no actionlint (https://github.com/rhysd/actionlint)")
    done = processes.run(actionlint, "-shellcheck=", "-pyflakes=", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
