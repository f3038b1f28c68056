"""The README is true: its code runs, and its commands exist."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from aioserve.cli.main import main
from tests import processes
from tests.processes import PATIENCE, serving

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


PYTHON = blocks("python")


def run_python(code: str) -> None:
    """Run it in this process, which has imported what a program would import for seconds."""
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_the_policy_that_is_shown_is_the_one_that_ships() -> None:
    (policy,) = [code for code in PYTHON if "class ChunkedPrefillScheduler" in code]
    assert policy == (ROOT / "policies/chunked_prefill.py").read_text()
    num_lines = len([line for line in policy.splitlines() if line])
    assert f"## A policy in {num_lines} lines\n" in README
    assert f" {num_lines} lines cut the p99 gap" in README


def test_the_engine_example_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [code for code in PYTHON if "AsyncEngine()" in code]
    run_python(code)
    assert capsys.readouterr().out.strip()


def test_the_curl_command_streams_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Against the real server, on another port; the client of docs/embedding.md uses it too."""
    with serving(cwd=ROOT) as (server, url):
        (curl,) = [block for block in blocks("bash") if block.startswith("curl")]
        command = curl.replace("http://127.0.0.1:8000", url)
        streamed = processes.run("sh", "-c", command).stdout
        assert streamed.endswith("data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in streamed.splitlines()[:-2] if line]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert f"The answer, `{text}`," in README
        embedding = (ROOT / "docs/embedding.md").read_text()
        codes = re.findall(r"^```python\n(.*?)^```", embedding, re.DOTALL | re.MULTILINE)
        (client,) = [code for code in codes if "AsyncClient(" in code]
        run_python(client.replace("http://127.0.0.1:8000", url))
        assert capsys.readouterr().out.strip()
        server.terminate()
        assert server.wait(PATIENCE) == 0


def test_the_comparison_prints_the_rows_that_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = [
        block for block in blocks("bash") if block.count("\n") == 1 and " compare " in block
    ]
    python, option, package, *words = command.split()
    assert (python, option, package) == ("python", "-m", "aioserve")
    monkeypatch.chdir(ROOT)
    assert main([*words, "--jobs", "1"]) == 0  # in this process, which prints the same
    printed = capsys.readouterr().out
    (shown,) = [block for block in blocks("text") if "TTFT p99" in block]
    assert set(shown.splitlines()) <= set(printed.splitlines())


def test_the_readme_has_at_most_200_lines() -> None:
    assert README.count("\n") <= 200


def test_every_file_and_target_that_is_named_exists() -> None:
    for path in re.findall(r"\b(?:configs|policies|benchmarks|docs|examples)/[\w./-]+\w", README):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_goals_of_make_that_are_named_together_run_one_after_the_other() -> None:
    """`make clean test` would remove what it has just installed."""
    environment = {n: value for n, value in os.environ.items() if not n.startswith("MAKE")}
    for goals, are_parallel in (("serve", True), ("clean test", False), ("test-wheel", False)):
        printed = subprocess.run(
            ["make", "-pn", *goals.split()],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            check=True,
        ).stdout
        (flags,) = re.findall(r"^MAKEFLAGS = (.*)$", printed, re.MULTILINE)
        assert ("-j2" in flags) is are_parallel, goals
