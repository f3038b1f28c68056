"""JSON is for programs: the commands print it into a pipe, and at a terminal only with `--json`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from aioserve.lab.terminal import DURATIONS
from tests import processes
from tests.console.terminal import at_terminal
from tests.lab.traffic import record
from tests.processes import PATIENCE


def piped(*words: str) -> list[str]:
    """The lines that a command prints into a pipe."""
    result = processes.run(sys.executable, "-m", "aioserve", *words)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def shown(*words: str) -> list[str]:
    """The lines that it prints at a terminal, without those of its progress."""
    with at_terminal(sys.executable, "-m", "aioserve", *words) as (terminal, process):
        lines: list[str] = []
        try:
            while True:
                lines.append(terminal.wait(r"\r?\n").rstrip("\r\n").rpartition("\r")[2])
        except AssertionError:  # its end
            assert process.wait(PATIENCE) == 0, lines
        return lines


def documents(lines: list[str]) -> list[Any]:
    return [json.loads(line) for line in lines if line.startswith("{")]


def check(*words: str) -> tuple[list[str], Any]:
    """What the command prints at a terminal, and its JSON, which is the last line of a pipe."""
    *_, last = piped(*words)
    at_a_terminal = shown(*words)
    assert at_a_terminal
    assert documents(at_a_terminal) == []
    [told] = documents(shown(*words, "--json"))
    assert told.keys() == json.loads(last).keys()
    return at_a_terminal, told


@pytest.mark.slow
def test_replay(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path, num_requests=20)
    lines, told = check("replay", str(path))
    assert told["identical"] is True
    lines, told = check("replay", str(path), "--policy", "fcfs")
    assert told["recorded"].keys() >= {"e2e p50 ms", "gap p50 ms"}
    for word in ("TTFT", "gap", "end to end"):
        [line] = [line for line in lines if DURATIONS[word] in line]
        assert line.startswith(word)
    assert not [line for line in lines if "e2e" in line or DURATIONS["TPOT"] in line]


@pytest.mark.slow
def test_bench(tmp_path: Path) -> None:
    with processes.serving("--runner", "simulated", "--step-base-ms", "1") as (process, url):
        processes.read_lines(process)
        words = ("bench", url, "--num-requests", "3", "--output-tokens", "3")
        lines, told = check(*words)
        assert told["requests"]["finished"] == 3
        for word, meaning in DURATIONS.items():
            assert [line for line in lines if line.startswith(word) and line.endswith(meaning)]
        output = tmp_path / "out.json"
        assert documents(piped(*words, "-o", str(output))) == []
        [told] = documents(piped(*words, "-o", str(output), "--json"))
        assert told == json.loads(output.read_bytes())


@pytest.mark.slow
def test_calibrate() -> None:
    lines, told = check("calibrate", "--quick")
    assert told["base_ms"] > 0
    assert [line for line in lines if line.startswith("base_ms ")]
