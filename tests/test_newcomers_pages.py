"""The pages for newcomers say what is so: flags and codes exist, commands and code run."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from aioserve.cli.main import TOOLS
from aioserve.cli.serve import build_parser, load_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FLAGS = {flag for action in build_parser()._actions for flag in action.option_strings}


def table(page: str) -> list[list[str]]:
    """The cells of the rows of a page's tables, but for heads and rules."""
    rows = re.findall(r"^\|(.+)\|$", (DOCS / page).read_text(), re.M)
    cells = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    return [row for row in cells if not set(row[0]) <= set("-|")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def test_every_flag_that_is_put_beside_vllms_exists() -> None:
    rows = table("coming-from-vllm.md")[1:]
    assert len(rows) > 30
    for row in rows:
        for flag in re.findall(r"`(--[a-z-]+)", row[1]):
            assert flag in FLAGS, row


def test_every_flag_and_code_of_troubleshooting_exists() -> None:
    rows = table("troubleshooting.md")[1:]
    assert len(rows) > 15
    code = "\n".join(path.read_text() for path in (ROOT / "aioserve").rglob("*.py"))
    for row in rows:
        for flag in re.findall(r"`(--[a-z-]+)", " ".join(row)):
            assert flag in FLAGS, row
        for name in re.findall(r"`([a-z]+_[a-z_]+)`", row[0]):
            assert f'"{name}"' in code, row


def test_every_log_line_of_troubleshooting_is_in_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text().partition("## What the log says")[2]
    lines = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    sources = [path.read_text() for path in (ROOT / "aioserve").rglob("*.py")]
    trees = [ast.parse(source) for source in sources if "logg" in source]
    texts = "\n".join(
        re.sub(r"%[a-z.0-9]+", "...", node.value)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert len(lines) > 15
    for line in lines:
        for part in line.split("..."):
            assert part.strip(" ;") in texts, line


def test_the_code_of_the_first_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported what a program would import for seconds."""
    (block,) = blocks("start-here.md", "python")
    exec(compile(block, "start-here.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        line.partition("#")[0].strip()
        for block in blocks("start-here.md", "bash")
        for line in block.splitlines()
    ],
)
def test_the_commands_of_the_first_page_are_understood(line: str) -> None:
    words = shlex.split(line)
    if words[:3] == ["python", "-m", "aioserve"]:
        command = words[3] if words[3:] and not words[3].startswith("-") else "serve"
        if command == "serve":
            given = [word if word != "mine.py" else "policies/fcfs.py" for word in words[3:]]
            load_config(build_parser().parse_args(given))
        else:
            assert command in TOOLS
        for word in words[3:]:
            if word.startswith("configs/"):
                assert (ROOT / word).is_file()
    elif words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif words[0] == "cp":
        assert (ROOT / words[1]).is_file()
    else:
        pytest.fail(f"no command of the page is {words[0]}")
