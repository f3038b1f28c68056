"""Logs whose reader stands still: nothing waits for it, and it is told what it has missed."""

import fcntl
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioserve.errors import ConfigError
from aioserve.fleet.ray.serve_log import HandedOver
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.lab.workloads.traces import read_trace
from aioserve.support.files import begin_log
from aioserve.support.logs import BackgroundWriter, Gaps, dropped_lines
from tests.processes import JSON, PATIENCE, serving, until
from tests.slow import mostly_slow

LINE = b"x" * 99 + b"\n"


class Told(Gaps):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begins(self, error: OSError) -> None:
        self.begun.append(str(error))

    def ends(self, num_lines: int, error: OSError) -> bytes:
        return b"%d lost\n" % num_lines


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A small one."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    os.close(writer)
    os.close(reader)


def read_until(reader: int, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        data += os.read(reader, 65536)
    return data


def test_a_reader_that_stands_still_hears_how_much_it_has_missed(pipe: tuple[int, int]) -> None:
    told, before = Told(), dropped_lines["test"]
    writer = BackgroundWriter(pipe[1], "test", told, max_bytes=10_000)
    taken = [writer.write(LINE) for _ in range(500)]
    num_lost = taken.count(False)
    assert num_lost > 300
    assert not any(taken[taken.index(False) :])  # one gap, not one beside every line that fits
    assert told.begun == ["its reader stands still"]
    assert dropped_lines["test"] - before == num_lost
    assert not writer.wait_written(0.0)
    missed = b"%d lost\n" % num_lost
    assert read_until(pipe[0], missed) == LINE * (500 - num_lost) + missed
    assert writer.write(LINE)
    assert read_until(pipe[0], LINE) == LINE
    assert writer.close(PATIENCE)


def test_an_end_does_not_wait_for_a_reader_that_stands_still(pipe: tuple[int, int]) -> None:
    writer = BackgroundWriter(pipe[1], "test")
    for _ in range(100):
        writer.write(LINE)
    assert not writer.close(0.01)
    assert not writer.write(LINE)
    assert read_until(pipe[0], LINE)
    until(lambda: writer.close(1.0) or os.read(pipe[0], 65536), "the rest is written")


def test_the_log_of_another_program_that_stands_still_holds_up_no_caller() -> None:
    may_go_on, taken, before = threading.Event(), [], dropped_lines["log"]

    def target(record: logging.LogRecord) -> None:
        assert may_go_on.wait(PATIENCE)
        taken.append(record.getMessage())

    logger = logging.Logger("other")
    handed = HandedOver(target, max_bytes=10_000)
    logger.addHandler(handed)
    for i in range(100):
        logger.info("line %d", i)
    num_lost = dropped_lines["log"] - before
    assert num_lost > 50
    assert not handed.wait_written(0.0)
    may_go_on.set()
    assert handed.wait_written(PATIENCE)
    expected = [f"line {i}" for i in range(100 - num_lost)]
    assert taken == [*expected, f"{num_lost} lines of the log were dropped here"]
    logger.info("on")
    assert handed.wait_written(PATIENCE)
    assert taken[-1] == "on"


def test_a_pipe_that_another_process_made_non_blocking_gets_every_line(
    pipe: tuple[int, int],
) -> None:
    os.set_blocking(pipe[1], False)
    writer = BackgroundWriter(pipe[1], "test")
    for _ in range(100):
        writer.write(LINE)
    data = b""
    while len(data) < 100 * len(LINE):
        data += os.read(pipe[0], 65536)
    assert data == LINE * 100
    assert writer.close(PATIENCE)


def test_a_fifo_is_opened_when_something_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)
    writer = BackgroundWriter(begin_log(str(path), "log", 0o600), "test")
    writer.write(LINE)
    assert not writer.wait_written(0.0)
    with path.open("rb") as reader:
        assert writer.close(PATIENCE)
        assert reader.read() == LINE


def test_a_log_that_cannot_be_kept_is_no_reason_to_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_text("of the crash")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ConfigError, match="holds the log of an earlier run, which cannot be kept"):
        begin_log(str(path), "log", 0o600)
    monkeypatch.undo()
    monkeypatch.setattr(os, "link", refuse)  # as on a file system without links
    os.close(begin_log(str(path), "log", 0o600)())
    assert (tmp_path / "log.1").read_text() == "of the crash"


def complete(url: str) -> int:
    body = json.dumps({"prompt": [5] * 20, "max_tokens": 3, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, JSON)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        answer.read()
        return int(answer.status)


@pytest.mark.parametrize("workers", mostly_slow(["0", "1"], but=["0"]))
def test_a_log_reader_that_stands_still_holds_up_neither_requests_nor_the_end(
    workers: str, tmp_path: Path
) -> None:
    """All of its logs: the server's own, what a policy prints, requests and decisions."""
    policy = tmp_path / "prints.py"
    policy.write_text(
        "from policies.fcfs import FCFSScheduler\n\n\n"
        "class Prints(FCFSScheduler):\n"
        '    """Prints much."""\n\n'
        "    def schedule(self):\n"
        '        print("x" * 4096)\n'
        "        return super().schedule()\n"
    )
    held, files = [], []
    for name in ("requests", "decisions"):
        os.mkfifo(tmp_path / name)
        held.append(os.open(tmp_path / name, os.O_RDWR))  # which keeps it open, and reads nothing
        fcntl.fcntl(held[-1], fcntl.F_SETPIPE_SZ, 4096)
        files += [f"--{name.removesuffix('s')}-log", str(tmp_path / name)]
    reader, stdout = os.pipe()
    command = ["--runner", "simulated", "--policy", f"{policy}:Prints", "--api-workers", workers]
    with serving(*command, *files, stdout=stdout) as (process, url):
        assert process.stderr is not None
        fcntl.fcntl(process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(60):
            assert complete(url) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    for file in (*held, reader, stdout):
        os.close(file)


@pytest.mark.slow
def test_a_server_that_was_killed_loses_no_log_to_the_next_ones(tmp_path: Path) -> None:
    requests, decisions = tmp_path / "requests.jsonl", tmp_path / "decisions.log"
    command = ["--runner", "simulated"]
    command += ["--request-log", str(requests), "--decision-log", str(decisions)]

    def are_written(number: int) -> bool:
        lines = requests.read_bytes().count(b"\n")
        return lines == number == replay(DecisionLog(decisions)).num_requests

    for number in (1, 2):
        with serving(*command) as (process, url):
            for _ in range(number):
                complete(url)
            until(functools.partial(are_written, number), "the logs are written")
            process.kill()
            process.wait()
    for number, infix in (1, ".1"), (2, ""):
        assert len(read_trace(tmp_path / f"requests{infix}.jsonl").requests) == number
        result = replay(DecisionLog(tmp_path / f"decisions{infix}.log"))
        assert (result.num_requests, result.divergence) == (number, None)


def test_a_line_that_was_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    whole = '{"arrival":0.5,"prompt_tokens":7,"output_tokens":3,"user":"Zoë"}\n'
    for length in range(1, len(whole.encode())):
        path.write_bytes(whole.encode() + whole.encode()[:length])
        assert len(read_trace(path).requests) in (1, 1 + (length == len(whole.encode()) - 1))


def test_an_embedded_engine_leaves_logging_and_streams_alone() -> None:
    code = """
import asyncio, logging, sys
from aioserve import AsyncEngine, EngineConfig
from aioserve.config import RunnerConfig

async def main():
    before = sys.stdout, sys.stderr, list(logging.getLogger().handlers)
    async with AsyncEngine(EngineConfig(runner=RunnerConfig(runner="simulated"))):
        assert before == (sys.stdout, sys.stderr, logging.getLogger().handlers)

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
