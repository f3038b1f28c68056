"""Behind the proxies that `deploy/` sets up, tokens come as they are made and clients may leave.

Skipped where a proxy is not installed (apt-get install nginx-light caddy).
"""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.processes import serving, until

DEPLOY = Path(__file__).parents[2] / "deploy"
HOST = "models.example.com"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def nginx(tmp_path: Path, port: int, behind: int) -> list[str]:
    site = (DEPLOY / "nginx.conf").read_text()
    (tmp_path / "site.conf").write_text(
        site.replace("127.0.0.1:8000", f"127.0.0.1:{behind}").replace("8080", str(port))
    )
    own = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy"))
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log {tmp_path}/error.log; daemon off; events {{}}\n"
        f"http {{ access_log off; {own} include {tmp_path}/site.conf; }}\n"
    )
    return ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]


def caddy(tmp_path: Path, port: int, behind: int) -> list[str]:
    site = (DEPLOY / "Caddyfile").read_text()
    (tmp_path / "Caddyfile").write_text(
        site.replace("127.0.0.1:8000", f"127.0.0.1:{behind}").replace(
            f"\n{HOST} {{", f"\nhttp://{HOST}:{port} {{"
        )
    )
    config = str(tmp_path / "Caddyfile")
    return ["caddy", "run", "--config", config, "--adapter", "caddyfile"]


@pytest.fixture(params=[nginx, caddy], ids=["nginx", "caddy"])
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a proxy in front of a server, and the file with the server's log."""
    make: Callable[[Path, int, int], list[str]] = request.param
    if not shutil.which(make.__name__):
        pytest.skip(f"{make.__name__} is not installed")
    settings = ("--runner", "simulated", "--port", "0", "--allowed-hosts", HOST)
    with serving(*settings) as (_, url):
        port = free_port()
        words = make(tmp_path, port, int(url.rpartition(":")[2]))
        with (tmp_path / "proxy.log").open("w") as log:
            environ = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
            process = subprocess.Popen(words, stdout=log, stderr=log, env=environ)
        try:

            def listens() -> bool:
                with socket.socket() as sock:
                    return sock.connect_ex(("127.0.0.1", port)) == 0

            until(listens, "the proxy listens")
            yield f"http://127.0.0.1:{port}", tmp_path
        finally:
            process.terminate()
            process.wait(processes.PATIENCE)


def ask(url: str, **fields: object) -> urllib.request.Request:
    body = {"model": "embedded", "prompt": [1, 2, 3], "stream": True, "ignore_eos": True, **fields}
    headers = {"Host": HOST, "Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)


@pytest.mark.slow
def test_tokens_come_one_by_one_through_a_proxy(proxy: tuple[str, Path]) -> None:
    url, _ = proxy
    times = []
    with urllib.request.urlopen(ask(url, max_tokens=100), timeout=processes.PATIENCE) as response:
        for line in response:
            if line.startswith(b"data:"):
                times.append(time.monotonic())
    assert line == b"\n"
    assert len(times) > 50
    assert len(set(times)) > 50  # not all at once


@pytest.mark.slow
def test_a_client_that_leaves_through_a_proxy_ends_its_request(proxy: tuple[str, Path]) -> None:
    url, _ = proxy
    with urllib.request.urlopen(ask(url, max_tokens=3000), timeout=processes.PATIENCE) as response:
        response.readline()

    def has_ended() -> bool:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/metrics", headers={"Host": HOST})
        ) as response:
            lines = response.read().decode().splitlines()
        return any(
            line.startswith("aioserve_requests_finished_total")
            and 'reason="abort"' in line
            and float(line.rpartition(" ")[2]) > 0
            for line in lines
        )

    until(has_ended, "the request is aborted")
