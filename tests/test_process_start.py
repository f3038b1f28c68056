"""What a server inherits from a careless parent does no harm, and SIGTERM ends it at any time."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.processes import JSON, PATIENCE, read_lines, serving, started, until
from tests.slow import mostly_slow

SIMULATED = ("--runner", "simulated")


def careless(words: str) -> list[str]:
    """A Python that does what `words` say, and becomes the program behind it."""
    code = f"import os, signal, sys; {words}; os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code, sys.executable]


def chat(url: str) -> int:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, JSON)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 2
        return int(answer.status)


@pytest.mark.parametrize("workers", mostly_slow(["0", "1"], but=["0"]))
def test_signals_that_the_parent_has_blocked_or_ignored_end_the_server(workers: str) -> None:
    words = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    )
    options = {"python": careless(words)}
    with serving(*SIMULATED, "--api-workers", workers, **options) as (process, url):
        read_lines(process)
        assert chat(url) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_a_template_has_its_limit_of_time_where_the_parent_has_blocked_signals() -> None:
    code = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
from aioserve.engine.template_renderer import TemplateRenderer, TemplateTooSlowError
renderer = TemplateRenderer(seconds=0.2)
loops = "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2
try:
    renderer.render(loops, {})
except TemplateTooSlowError:
    print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout == "ended\n", done.stderr


def accepts(uds: str) -> bool:
    """Whether a server listens there: its socket has a name some time before."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(uds) == 0


@pytest.mark.parametrize(
    "closed",
    [(0, 1, 2), *(pytest.param(some, marks=pytest.mark.slow) for some in [(0,), (1,), (0, 1)])],
)
def test_no_socket_takes_the_place_of_a_standard_stream(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    policy = tmp_path / "prints.py"
    policy.write_text(
        "from aioserve.policies.fcfs import FCFSScheduler\n\n\n"
        "class Prints(FCFSScheduler):\n"
        '    """Prints."""\n\n'
        "    def schedule(self):\n"
        '        print("printed", flush=True)\n'
        "        return super().schedule()\n"
    )
    uds = str(tmp_path / "socket")
    command = [*careless(f"[os.close(n) for n in {closed}]"), "-m", "aioserve", *SIMULATED]
    with started(*command, "--uds", uds, "--policy", f"{policy}:Prints") as process:
        until(lambda: accepts(uds) or process.poll() is not None, "it listens")
        files = {n: os.readlink(f"/proc/{process.pid}/fd/{n}") for n in (0, 1, 2)}
        assert all(files[n] == os.devnull for n in closed)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE)
            client.connect(uds)
            client.sendall(b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("seconds", "number"),
    mostly_slow(
        itertools.product([0.1, 0.3, 0.6, 1.0], [signal.SIGTERM, signal.SIGINT]),
        but=[(0.1, signal.SIGTERM), (0.3, signal.SIGINT), (0.6, signal.SIGTERM)],
    ),
)
def test_a_signal_at_any_moment_of_the_start_ends_it_with_exit_code_0(
    seconds: float, number: signal.Signals, tmp_path: Path
) -> None:
    """Seconds of processor time, by which a start goes as far on a busy machine; or its end."""
    uds = str(tmp_path / "socket")
    command = (sys.executable, "-m", "aioserve", "--uds", uds, *SIMULATED)
    with started(*command, stderr=subprocess.PIPE) as process:
        until(lambda: cpu_seconds(process.pid) >= seconds or accepts(uds), "it has begun")
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with serving(*SIMULATED, is_shared=True) as server:
        yield server


def test_a_simulated_server_answers_without_torch(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = server
    assert chat(url) == 200
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "uvloop" in maps
    assert "torch" not in maps


def test_a_template_process_that_stands_still_costs_one_conversation(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    """Those behind it are served by a new process; text prompts are served meanwhile."""
    process, url = server
    assert chat(url) == 200
    for child in psutil.Process(process.pid).children():
        if any("template" in word for word in child.cmdline()):
            child.suspend()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(chat, url) for _ in range(4)]
        refused = [error for one in asked if (error := one.exception()) is not None]
    (error,) = refused
    assert isinstance(error, urllib.error.HTTPError)
    with error:
        assert error.code == 503
        assert int(error.headers["Retry-After"]) >= 1
        assert json.load(error)["error"]["code"] == "template_stalled"
