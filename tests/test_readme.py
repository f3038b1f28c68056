"""The README is true: its code runs, its commands exist, its tree is the tree."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.processes import PATIENCE, serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


PYTHON = blocks("python")


def run_python(code: str) -> str:
    result = processes.run(sys.executable, "-c", code, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_policy_that_is_shown_is_the_one_that_ships() -> None:
    (policy,) = [code for code in PYTHON if "class ChunkedPrefillScheduler" in code]
    assert policy == (ROOT / "policies/chunked_prefill.py").read_text()


def test_the_harness_example_runs() -> None:
    (code,) = [code for code in PYTHON if "SchedulerHarness(" in code]
    assert re.fullmatch(r"\d+ steps, \d+ preemptions\n", run_python(code))


def test_the_engine_example_prints_text() -> None:
    (code,) = [code for code in PYTHON if "AsyncEngine()" in code]
    assert run_python(code).strip()


def test_the_curl_command_streams_what_the_readme_shows() -> None:
    """Against the real server, on another port; the client example uses it as well."""
    with serving(cwd=ROOT) as (server, url):
        (curl,) = [block for block in blocks("bash") if block.startswith("curl")]
        command = curl.replace("http://127.0.0.1:8000", url)
        streamed = processes.run("sh", "-c", command).stdout
        assert streamed.endswith("data: [DONE]\n\n")
        (shown,) = [block for block in blocks("text") if block.startswith("data:")]
        volatile = re.compile(r'"(id|created)":[^,]*,')
        lines = [volatile.sub("", line) for line in streamed.splitlines() if line]
        for line in filter(None, shown.splitlines()):
            if line != "...":
                assert volatile.sub("", line) in lines
        (client,) = [code for code in PYTHON if "AsyncClient(" in code]
        assert run_python(client.replace("http://127.0.0.1:8000", url)).strip()
        server.terminate()
        assert server.wait(PATIENCE) == 0


def test_the_comparison_prints_the_table_that_is_shown() -> None:
    (command,) = [
        block for block in blocks("bash") if block.count("\n") == 1 and " compare " in block
    ]
    python, *arguments = command.split()
    assert python == "python"
    printed = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    (shown,) = [block for block in blocks("text") if "TTFT p99" in block]
    assert shown == printed


def test_the_tree_lists_every_module_and_nothing_else() -> None:
    (tree,) = [block for block in blocks("text") if block.startswith("aioserve/")]
    listed, folder = set(), {0: ""}
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        path = folder[indent] + line.split()[0]
        if path.endswith("/"):
            folder[indent + 2] = path
        else:
            listed.add(path)
    tracked = subprocess.run(
        ["git", "ls-files", "aioserve", "policies"], capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    modules = {
        path
        for path in tracked
        if path.endswith(".py") and os.path.basename(path) not in ("__init__.py", "__main__.py")
    }
    if not modules:
        pytest.skip("not a git checkout")
    assert listed >= modules, f"missing in the README: {sorted(modules - listed)}"
    assert all((ROOT / path).exists() for path in listed)


def test_every_file_and_target_that_is_named_exists() -> None:
    for path in re.findall(r"\b(?:configs|policies|benchmarks|docs|examples)/[\w./-]+\w", README):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
