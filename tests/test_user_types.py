"""A user's typed programs, in `typed/`, pass mypy --strict, which `make check` runs on them, and
pyright where aioserve is installed.
"""

import shutil
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "typed"


@pytest.mark.slow
def test_typed_programs_pass_pyright_and_mistakes_in_them_are_found(tmp_path: Path) -> None:
    """basedpyright is pyright in a package that needs no download of its own at its first run."""
    (tmp_path / "pyrightconfig.json").write_text(
        '{"typeCheckingMode": "strict", "enableTypeIgnoreComments": false}'
    )
    shutil.copytree(PROGRAMS, tmp_path, dirs_exist_ok=True)
    said = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    errors = [line for line in said.splitlines() if " - error: " in line]
    assert len(errors) == 3, said
    assert all("wrong.py" in error for error in errors)
    assert 'No parameter named "max_tokns"' in errors[0]
    assert 'No parameter named "adaptor"' in errors[1]
    assert said.endswith("\n3 errors, 0 warnings, 0 notes\n")


def test_the_package_says_that_it_has_types() -> None:
    """Without this file type checkers ignore the annotations of what is installed."""
    assert (resources.files("aioserve") / "py.typed").is_file()
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(text)
    assert "py.typed" in settings["tool"]["setuptools"]["package-data"]["aioserve"]
