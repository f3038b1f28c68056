"""The example package installs, is found by its name, passes the contract and serves.

And `docs/writing-a-policy.md`, which builds it, shows exactly its files. The notebook runs.
"""

import ast
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.processes import PATIENCE, until

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/shortest_first"
PAGE = (ROOT / "docs/writing-a-policy.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which the installed example is on the path."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("site")
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)  # pip builds in the tree
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)),
            str(source / EXAMPLE.name),
        ],
        check=True,
    )
    return {**os.environ, "PYTHONPATH": str(target)}


def run(environment: dict[str, str], *arguments: str, cwd: Path = ROOT) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow  # quick: the comparison of the page, which names it
def test_the_installed_policy_is_found_by_its_name(environment: dict[str, str]) -> None:
    code = "from aioserve.scheduler import *; print(load_policy('shortest_first').__module__)"
    assert run(environment, "-c", code).strip() == "aioserve_shortest_first.policy"


@pytest.mark.slow
def test_it_passes_the_contract_by_name_from_anywhere(
    environment: dict[str, str], tmp_path: Path
) -> None:
    printed = run(
        environment,
        *("-m", "pytest", "-q", "-p", "no:schemathesis", "--aioserve-policy", "shortest_first"),
        "--aioserve-examples=10",  # its own tests run all
        cwd=tmp_path,
    )
    assert re.search(r"\d+ passed", printed)
    assert "failed" not in printed


@pytest.mark.slow
def test_its_own_tests_pass(environment: dict[str, str]) -> None:
    printed = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE))
    assert re.search(r"\d+ passed", printed)


def test_the_comparison_of_the_page_runs(environment: dict[str, str]) -> None:
    (command,) = [block for block in blocks("bash") if " compare " in block]
    printed = run(environment, *command.split()[1:], "--limit", "10")
    assert "shortest_first" in printed
    assert "TTFT p99" in printed


def test_the_page_shows_the_files_of_the_package() -> None:
    policy, contract, _ = blocks("python")  # the last one is run beside the harness
    assert policy == (EXAMPLE / "aioserve_shortest_first/policy.py").read_text()
    assert contract.rstrip() in (EXAMPLE / "tests/test_shortest_first.py").read_text().replace(
        "from aioserve.testing import SchedulerHarness\n", ""
    )
    (entry_point,) = blocks("toml")
    assert entry_point in (EXAMPLE / "pyproject.toml").read_text()
    (config,) = blocks("yaml")
    assert config == (EXAMPLE / "shortest_first.yaml").read_text()


def test_every_file_and_option_that_the_page_names_exists() -> None:
    for path in re.findall(r"\b(?:configs|examples|aioserve)/[\w./-]+\w", PAGE):
        assert (ROOT / path).exists(), path
    for command in blocks("bash"):
        if "-m aioserve --config" in command:
            from aioserve.config import EngineConfig

            EngineConfig.load(ROOT / command.split()[-1])


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_the_notebook_runs_in_a_loop_that_runs_already(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cell by cell, with `await` at the top level, as a notebook's kernel does it."""
    notebook = json.loads((ROOT / "examples/compare.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        code = compile("".join(cell["source"]), cell["id"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result
    printed = capsys.readouterr().out
    assert "chunks of 256" in printed
    assert re.search(r"fcfs: gap p99 \d+ ms", printed)
    assert len(names["replies"]["fcfs"]) == 2


def test_the_fastapi_program_streams_and_ends_what_a_client_leaves(tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason="pip install fastapi uvicorn")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = ["-m", "uvicorn", "--app-dir", "examples", "fastapi_app:app", "--port", str(port)]
    url = f"http://127.0.0.1:{port}/say?prompt=To%20be&max_tokens="
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=log, stdout=log)
    try:

        def listens() -> bool:
            with socket.socket() as sock:
                return sock.connect_ex(("127.0.0.1", port)) == 0

        until(listens, "the program listens")
        with urllib.request.urlopen(f"{url}20", timeout=PATIENCE) as response:
            assert response.read()
        with urllib.request.urlopen(f"{url}900", timeout=PATIENCE) as response:
            response.read(1)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(f"{url}-1", timeout=PATIENCE)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text()
