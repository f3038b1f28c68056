"""Processes that tests start: waited for by what they say, not by the clock, and ended always.

Knows `Popen` and patience; knows nothing about what a test wants of them.
"""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Seconds after which whatever has not happened never will: so that nothing hangs the suite, on the
# slowest and busiest machine. No test is about it.
PATIENCE = 60.0
# The same for a program that computes, to its end: a compiler, a test suite, a benchmark.
COMPUTING_SECONDS = 240.0
# What a process that many tests share may live: longer than any suite takes.
SUITE_SECONDS = 7200.0

#: The header of what urllib would call a form.
JSON = {"Content-Type": "application/json"}


def until(is_true: Callable[[], object], what: str) -> None:
    """Ask again and again until it is; asking takes half of the time, at most."""
    give_up = time.monotonic() + PATIENCE
    while True:
        began = time.monotonic()
        if is_true():
            return
        assert time.monotonic() < give_up, f"{what}: not in {PATIENCE:.0f} s"
        time.sleep(max(0.01, time.monotonic() - began))


def _kill(process: subprocess.Popen[str]) -> None:
    """End it and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def killed_after(patience: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """If the block takes longer than `patience` seconds, the process is killed: so whatever waits
    for its output sees an end.
    """
    guard = threading.Timer(patience, _kill, [process])
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


@contextmanager
def started(
    *command: str, patience: float = COMPUTING_SECONDS, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process, and what it starts, that do not outlive the block, nor our patience.

    So whoever reads its output sees an end. `options` are those of `Popen`.
    """
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)

    try:
        with killed_after(patience, process):
            yield process
    finally:
        _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def serving(
    *argv: str, is_shared: bool = False, **options: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`python -m aioserve serve` and its URL, once it listens; its log can be read from there on.

    A program of another name may run it: `options["python"]`, words before `-m`. A server that
    `is_shared` by several tests lives until the block ends, however long one of them waits.
    """
    python = options.pop("python", [sys.executable])
    command = [*python, "-m", "aioserve", "serve", "--port", "0", *argv]
    options |= {"patience": SUITE_SECONDS} if is_shared else {}
    with started(*command, stderr=subprocess.PIPE, **options) as process:
        with killed_after(COMPUTING_SECONDS, process):
            url = _url_of(process)
        if is_shared:  # its log is for none of the tests, and must not fill the pipe
            read_lines(process)
        yield process, url


def _url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"listening on (http://[^\s,]+)", line):
            return found[1]
    raise AssertionError("".join(lines))


def read_lines(process: subprocess.Popen[str]) -> "queue.Queue[str]":
    """What it writes to stderr from here on, line by line: read at once, so that it never waits."""
    lines: queue.Queue[str] = queue.Queue()
    stderr = process.stderr
    assert stderr is not None

    def read() -> None:
        with suppress(ValueError):  # it was closed
            for line in stderr:
                lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    return lines


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process to its end; what it printed as text."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=COMPUTING_SECONDS, **options
    )
