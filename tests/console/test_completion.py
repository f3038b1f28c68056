"""Tab in real shells, and what it offers on any line."""

import functools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from aioserve.cli.main import SERVE, TOOLS, main
from aioserve.config import iter_settings
from aioserve.scheduler import available_policies
from aioserve.support.files import config_names
from tests import processes
from tests.console.terminal import at_terminal
from tests.processes import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Folders of programs, the command aioserve of this environment first."""
    (tmp_path / "aioserve").write_text(f'#!/bin/sh\nexec {sys.executable} -m aioserve "$@"\n')
    (tmp_path / "aioserve").chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


#: Asks what the program tells a shell, in a process of its own for each line: forked where its
#: parsers are loaded. argcomplete answers on file 8.
ASKING = """
import json, os, sys
from aioserve.cli.main import main

offers = {}
for line in json.loads(sys.argv.pop()):
    answer, asked = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(asked, 8)
        os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
        try:
            main()
        finally:
            os._exit(1)
    os.close(asked)
    with os.fdopen(answer) as file:
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0, line
    offers[line] = [word.strip() for word in said.split("\\v")]
print(json.dumps(offers))
"""
LINES: dict[str, set[str]] = {
    "aioserve --policy f": {"fair", "fcfs"},
    "aioserve serve --shadow-policy hr": {"hrrn"},
    "aioserve --dtype f": {"float32", "float16"},
    "aioserve --model embed": {"embedded"},
    "aioserve --config configs/f": {f"configs/{n}.yaml" for n in config_names() if n[0] == "f"},
    "aioserve compare --workload mix": {"mixed"},
    "aioserve compare fcfs chunk": {"chunked_prefill"},
    "aioserve sweep --set scheduler.po": {"scheduler.policy="},
    "aioserve --tool-call-parser he": {"hermes"},
    "aioserve --reasoning-parser a": {"auto"},
    "aioserve chat --sam": {"--sampling"},
    "aioserve fetch s": {"smollm2"},
    "aioserve completion z": {"zsh"},
    "aioserve no-such-command": {""},
}
OTHER_LINES = ("aioserve ", "aioserve --", "aioserve --policy ")


@functools.cache
def offers() -> dict[str, list[str]]:
    """By line, what the program tells a shell that asks what may follow."""
    lines = json.dumps([*LINES, *OTHER_LINES])
    asked = processes.run(sys.executable, "-c", ASKING, lines, cwd=ROOT)
    assert asked.returncode == 0, asked.stderr
    found: dict[str, list[str]] = json.loads(asked.stdout)
    return found


def test_the_first_word_is_a_command_or_a_flag() -> None:
    assert set(offers()["aioserve "]) == {SERVE, *TOOLS}
    flags = offers()["aioserve --"]
    for _, field in iter_settings():
        if not field.name.endswith("options"):
            assert f"--{field.name.replace('_', '-')}" in flags


@pytest.mark.parametrize(("line", "names"), LINES.items())
def test_names_are_offered_where_they_are_taken(line: str, names: set[str]) -> None:
    words = offers()[line]
    assert names <= set(words)
    assert all(word.startswith(line.rpartition(" ")[2]) for word in words if word)


def test_all_installed_policies_are_offered() -> None:
    assert set(available_policies()) <= set(offers()["aioserve --policy "])


@pytest.mark.parametrize(
    ("shell", "options", "before"),
    [
        ("bash", ["--norc", "--noprofile", "-i"], ""),
        ("zsh", ["-f", "-i"], "autoload -U compinit; compinit -u -D; "),
    ],
)
def test_tab_completes_in_a_real_shell(
    shell: str, options: list[str], before: str, path: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    environment = {"PATH": path, "PS1": "ready> ", "HISTFILE": "", "TERM": "vt100"}
    with at_terminal(shell, *options, environment=environment) as (terminal, process):
        terminal.wait("ready> ")
        terminal.type(f'{before}eval "$(aioserve completion {shell})"; echo it is "set"\n')
        terminal.wait(r"it is set[\s\S]*ready> ")
        terminal.type("aioserve --poli\t")
        terminal.wait(r"--policy ")
        terminal.type("chunk\t")
        terminal.wait(r"chunked_prefill ")
        terminal.type("--served-mod\tx --version\n")
        terminal.wait(r"aioserve \d+\.\d+")
        terminal.type("exit\n")
        assert process.wait(timeout=PATIENCE) == 0


def test_without_argcomplete_the_line_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install argcomplete" in capsys.readouterr().err
