"""A service manager hears when the server serves, and when it stops."""

import asyncio
import json
import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from aioserve.server.process import (
    SOCKET_VARIABLE,
    WATCHDOG_PID_VARIABLE,
    WATCHDOG_VARIABLE,
    notify,
    tell_that_the_loop_turns,
)
from tests import processes
from tests.processes import JSON, serving

SIMULATED = ("--runner", "simulated", "--port", "0")
BODY = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()


@pytest.fixture
def manager(tmp_path: Path) -> socket.socket:
    """The socket on which systemd would listen."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.settimeout(processes.PATIENCE)
    return sock


def test_the_server_says_when_it_serves_that_its_loop_turns_and_when_it_drains(
    manager: socket.socket, tmp_path: Path
) -> None:
    environ = {**os.environ, SOCKET_VARIABLE: str(tmp_path / "notify"), WATCHDOG_VARIABLE: "30000"}
    with serving(*SIMULATED, env=environ) as (process, url):
        ready, status = manager.recv(1000).decode().splitlines()
        assert (ready, status) == ("READY=1", f"STATUS=serves embedded on {url}")
        request = urllib.request.Request(f"{url}/v1/completions", BODY, JSON)
        with urllib.request.urlopen(request, timeout=processes.PATIENCE) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
        assert [manager.recv(1000) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        process.send_signal(signal.SIGTERM)
        while (told := manager.recv(1000)) == b"WATCHDOG=1":
            pass
        assert told.decode().splitlines()[0] == "STOPPING=1"
        _, stderr = process.communicate(timeout=processes.PATIENCE)
        assert process.returncode == 0
        assert "Traceback" not in stderr
    manager.close()


def test_a_service_manager_that_does_not_listen_or_read_holds_nothing_up(
    manager: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    notify("READY=1")  # there is none
    assert not caplog.text
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "notify"))
    for _ in range(2000):
        notify("STATUS=" + "x" * 1000)
    assert "the service manager at" in caplog.text  # its buffer is full
    manager.close()
    caplog.clear()
    notify("READY=1")
    assert "does not listen: Connection refused" in caplog.text


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {WATCHDOG_VARIABLE: "0"},
        {WATCHDOG_VARIABLE: "soon"},
        {WATCHDOG_VARIABLE: "1000", WATCHDOG_PID_VARIABLE: "1"},
    ],
)
def test_a_service_manager_that_watches_nothing_or_another_process_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    asyncio.run(tell_that_the_loop_turns())  # returns


def test_an_abstract_socket_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"aioserve-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        monkeypatch.setenv(SOCKET_VARIABLE, f"@{name}")
        notify("READY=1", "STATUS=here")
        assert manager.recv(100) == b"READY=1\nSTATUS=here"
