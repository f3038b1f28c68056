"""What a start says, and when: the first line, bars on a terminal, a wrong folder."""

import importlib
import json
import logging
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aioserve.config import ModelConfig
from aioserve.model_source.info import ModelInfo
from aioserve.support.progress import BAR, BesideBars, show_no_bars, stage
from tests.processes import PATIENCE, started, until

ROOT = Path(__file__).parents[1]
TITLES = ["Loading weights", "Trying layers", "Checking fused layers", "Laying out weights"]


def test_the_first_line_is_logged_before_anything_heavy_is_imported() -> None:
    """Were aiohttp imported first, its absence would end the process before the line."""
    code = """
import sys
for name in ("aiohttp", "torch", "transformers"):
    sys.modules[name] = None
from aioserve.cli.main import main
main(["--policy", "fcfs"])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first = result.stderr.splitlines()[0]
    assert first.endswith("starts: model embedded, policy fcfs")
    assert result.stderr.splitlines()[1:] == [
        f"aioserve: error: {sys.executable} lacks the package 'aiohttp': make install, in {ROOT}, "
        "brings it"
    ]


@pytest.mark.parametrize("words", [["doctor"], ["--help"], ["chat"], ["--policy", "fcfs"]])
def test_a_python_without_the_packages_says_in_a_line_what_to_type(words: list[str]) -> None:
    """As plain `python` in a clone: -S leaves out all that is installed."""
    result = subprocess.run(
        [sys.executable, "-S", "-m", "aioserve", *words], capture_output=True, text=True, cwd=ROOT
    )
    python = ROOT / ".venv" / "bin" / "python"
    make = "" if python.exists() else f"make install, in {ROOT}, then "
    lacks = f"aioserve: error: {sys.executable} lacks the package 'msgspec'"
    assert result.stderr == f"{lacks}: {make}{python} -m aioserve has all that it needs\n"
    assert (result.returncode, result.stdout) == (1, "")


def test_a_process_beside_the_first_shows_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    monkeypatch.setitem(BAR, "delay", 0.0)
    monkeypatch.setitem(BAR, "disable", None)  # as it was, afterwards
    with os.fdopen(writer, "w") as stderr, os.fdopen(reader, "rb", 0) as terminal:
        monkeypatch.setattr(sys, "stderr", stderr)
        show_no_bars()
        assert list(stage(range(3), "Loading", "layer")) == [0, 1, 2]
        stderr.write("end")
        stderr.flush()
        assert terminal.read(65536) == b"end"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_loading_shows_bars_on_a_terminal_and_logs_lines_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loading = importlib.import_module("aioserve.runner.cpu.models")
    monkeypatch.setitem(BAR, "delay", 0.0)  # the embedded model is loaded sooner
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        termios.tcsetwinsize(writer, (25, 80))  # a new one has no columns
    with os.fdopen(writer, "w") as stderr, os.fdopen(reader, "rb", 0) as terminal:
        monkeypatch.setattr(sys, "stderr", stderr)
        config = ModelConfig()
        caplog.set_level("INFO", "aioserve.support.progress")
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


class Hub(BaseHTTPRequestHandler):
    """Of the Hugging Face hub, what a download asks of it; its one model is the embedded one."""

    sha = "5" * 40

    def do_GET(self, with_body: bool = True) -> None:
        files = {path.name: path for path in (ROOT / "aioserve/model_source/embedded").iterdir()}
        path = self.path.partition("?")[0]
        if path == "/api/models/owner/name/revision/main":
            body = json.dumps({"id": "owner/name", "sha": self.sha, "siblings": []}).encode()
        elif path == f"/api/models/owner/name/tree/{self.sha}":
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": name}
                for name, file in files.items()
            ]
            body = json.dumps(entries).encode()
        elif path.startswith(f"/owner/name/resolve/{self.sha}/"):
            body = files[path.rpartition("/")[2]].read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("ETag", f'"{path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", self.sha)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing of it."""


@pytest.mark.slow
def test_the_log_tells_each_stage_of_a_start(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub, (tmp_path / "log").open("w") as log:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
        }
        command = [sys.executable, "-m", "aioserve", "--model", "owner/name", "--port", "0"]
        read = (tmp_path / "log").read_text
        with started(*command, stderr=log, env=environment) as process:
            until(lambda: "listening on" in read() or process.poll() is not None, "it serves")
        hub.shutdown()
    lines = re.findall(r"aioserve\.progress: (.*): (\d+) of \2, \d+\.\d s\n", read())
    fetching, *loading = [title for title, _ in lines]
    assert re.fullmatch(r"Fetching \d+ files", fetching)
    assert loading == TITLES


def test_a_line_of_the_log_takes_bars_away_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (25, 80))
    monkeypatch.setitem(BAR, "delay", 0.0)
    with os.fdopen(writer, "w") as stderr, os.fdopen(reader, "rb", 0) as terminal:
        monkeypatch.setattr(sys, "stderr", stderr)
        handler = BesideBars(stderr)
        for number in stage(range(2), "Loading", "layer"):
            record = logging.LogRecord("", logging.INFO, "", 0, "line %d", (number,), None)
            handler.emit(record)
        monkeypatch.undo()
        stderr.write("end")
        stderr.flush()
        shown = b""
        while not shown.endswith(b"end"):
            shown += terminal.read(65536)
    assert re.search(rb"Loading: +0%[^\n]*\r +\rline 0\r\n\rLoading: ", shown)
    assert re.search(rb"\r +\rline 1\r\n", shown)


def from_the_parent_of_a_clone(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "aioserve").symlink_to(ROOT)
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_an_installed_package_is_found_beside_a_clone_called_aioserve(tmp_path: Path) -> None:
    result = from_the_parent_of_a_clone(tmp_path, "-m", "aioserve", "--version")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("aioserve ")


def test_the_parent_of_a_clone_called_aioserve_is_told_apart(tmp_path: Path) -> None:
    result = from_the_parent_of_a_clone(tmp_path, "-S", "-m", "aioserve")  # it is not installed
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert f"finds the clone {tmp_path}/aioserve/, not the package in it: cd" in line
