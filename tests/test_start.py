"""What a start says, and when: the first line, bars on a terminal, a wrong folder."""

import importlib
import os
import pty
import re
import subprocess
import sys
import termios
import urllib.request
from pathlib import Path

import pytest

from aioserve.config import ModelConfig
from aioserve.model_info import ModelInfo
from aioserve.runner.progress import BAR
from tests.processes import serving, started, until

ROOT = Path(__file__).parents[1]
TITLES = ["Loading weights", "Checking fused layers", "Laying out weights"]


def test_the_first_line_is_logged_before_anything_heavy_is_imported() -> None:
    """Were aiohttp imported first, its absence would end the process before the line."""
    code = """
import sys
for name in ("aiohttp", "torch", "transformers"):
    sys.modules[name] = None
from aioserve.cli import main
main(["--policy", "fcfs"])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first = result.stderr.splitlines()[0]
    assert first.endswith("starts: model embedded, policy fcfs")
    assert "import of aiohttp halted" in result.stderr


def test_a_simulated_server_answers_without_torch() -> None:
    with serving("--runner", "simulated") as (process, url):
        body = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}'
        chat = urllib.request.Request(
            url + "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(chat) as answer:
            assert b'"completion_tokens":2' in answer.read()
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "uvloop" in maps
    assert "torch" not in maps


@pytest.mark.parametrize("is_terminal", [True, False])
def test_loading_shows_bars_on_a_terminal_and_logs_lines_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loading = importlib.import_module("aioserve.runner.cpu.load")
    monkeypatch.setitem(BAR, "delay", 0.0)  # the embedded model is loaded sooner
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        termios.tcsetwinsize(writer, (25, 80))  # a new one has no columns
    with os.fdopen(writer, "w") as stderr, os.fdopen(reader, "rb", 0) as terminal:
        monkeypatch.setattr(sys, "stderr", stderr)
        config = ModelConfig()
        caplog.set_level("INFO", "aioserve.runner.progress")
        loading.load_model_on_cpu(config, ModelInfo(config))
        monkeypatch.undo()
        stderr.write("end")
        stderr.flush()
        shown = b""
        while not shown.endswith(b"end"):
            shown += terminal.read(65536)
    told = [record.message.partition(":")[0] for record in caplog.records]
    if is_terminal:
        assert not told
        assert all(title.encode() in shown for title in TITLES)
    else:
        assert told == TITLES
        assert shown == b"end"


def test_the_log_of_a_server_tells_each_stage_of_loading(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "aioserve", "--port", "0"]
        with started(*command, stderr=log) as process:
            log_text = (tmp_path / "log").read_text
            until(lambda: "listening on" in log_text() or process.poll() is not None, "it serves")
    lines = re.findall(r"progress: (.*): (\d+) of \2, \d+\.\d s\n", log_text())
    assert [title for title, _ in lines] == TITLES


def test_the_parent_of_a_clone_called_aioserve_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "aioserve").symlink_to(ROOT)
    result = subprocess.run(
        [sys.executable, "-m", "aioserve"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"finds the clone {tmp_path}/aioserve/, not the package in it: cd" in line
