"""/livez says whether to end the process, /health and /ready whether to send it requests."""

import asyncio
import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import aiohttp
import pytest

from aioserve.engine import AsyncEngine
from aioserve.engine.operations import HealthCheck
from aioserve.engine.step_loop import StepLoop
from aioserve.model_source.info import ModelInfo
from aioserve.runner.simulated import SimulatedRunner
from aioserve.server.access import connections
from aioserve.server.app import listening
from aioserve.server.loading import answering_while_loading
from aioserve.server.sockets import bind, bind_beside, bind_unix
from tests.processes import PATIENCE, read_lines, started, until
from tests.server.serving import SIMULATED


async def status_of(server, path):
    answer = await server.get(path)
    return answer.status, answer.json()["status"]


async def test_a_server_that_serves_is_alive_and_ready(server):
    assert await status_of(server, "/livez") == (200, "ok")
    assert await status_of(server, "/health") == (200, "ok")
    assert await status_of(server, "/ready") == (200, "ready")


class HangingRunner(SimulatedRunner):
    """The step after `hang_next` was set comes back when `go_on` is."""

    def __init__(self) -> None:
        super().__init__(SIMULATED, ModelInfo(SIMULATED.model))
        self.hang_next = False
        self.go_on = asyncio.Event()

    def execute_model(self, scheduler_output):
        future = super().execute_model(scheduler_output)
        if not self.hang_next:
            return future
        self.hang_next = False

        async def late():
            await self.go_on.wait()
            return await future

        return asyncio.ensure_future(late())


async def test_a_step_that_hangs_makes_it_not_ready_until_it_is_back(start_server):
    runner = HangingRunner()
    async with start_server(runner, server={"hung_step_seconds": 0.05}) as server:
        runner.hang_next = True
        answer = asyncio.create_task(server.complete(max_tokens=3))
        async with asyncio.timeout(PATIENCE):
            while await status_of(server, "/ready") != (503, "hanging"):
                pass
        assert await status_of(server, "/health") == (503, "hanging")
        assert await status_of(server, "/livez") == (200, "ok")
        runner.go_on.set()
        assert (await answer).status == 200
        assert await status_of(server, "/ready") == (200, "ready")


IDLE = """
from aioserve.policies.fcfs import FCFSScheduler


class Idle(FCFSScheduler):
    def schedule(self):
        return self.new_step().output()
"""


async def test_a_policy_that_serves_nobody_makes_it_not_ready(start_server, tmp_path, monkeypatch):
    (tmp_path / "idle.py").write_text(IDLE)
    policy = {"policy": f"{tmp_path / 'idle.py'}:Idle", "options": {}, "stall_timeout": 1000.0}
    async with start_server(scheduler=policy, server={"enable_admin": True}) as server:
        assert await status_of(server, "/ready") == (200, "ready")  # there is nobody to serve
        answer = asyncio.create_task(server.complete(max_tokens=3))
        stalled = StepLoop.stalled_seconds
        async with asyncio.timeout(PATIENCE):
            while not server.engine.inspect().stalled_seconds:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await status_of(server, "/ready") == (200, "ready")  # for a while it may
        monkeypatch.setattr(
            StepLoop, "stalled_seconds", lambda loop: (s := stalled(loop)) and s + 600
        )
        assert await status_of(server, "/ready") == (503, "stalled")
        assert await status_of(server, "/health") == (503, "stalled")
        assert await status_of(server, "/livez") == (200, "ok")
        await server.request("POST", "/admin/policy", json={"policy": "fcfs"})
        assert (await answer).status == 200
        assert await status_of(server, "/ready") == (200, "ready")


@pytest.mark.parametrize("shares_port", [False, True])
async def test_while_the_model_loads_it_lives_and_refuses(shares_port):
    sockets = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    async with (
        answering_while_loading(sockets, shares_port=shares_port),
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"{url}/livez") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        for path in ("/health", "/ready"):
            async with session.get(url + path) as response:
                assert (response.status, (await response.json())["status"]) == (503, "loading")
                assert response.headers["Connection"] == "close"
                assert int(response.headers["Retry-After"]) > 0
        async with session.post(f"{url}/v1/completions", json={}) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "engine_unavailable"
        async with session.post(f"{url}/v1/messages", json={}) as response:
            assert (response.status, (await response.json())["type"]) == (503, "error")
    for sock in sockets:
        sock.close()


async def test_too_many_clients_while_it_loads_are_let_in_later(monkeypatch):
    monkeypatch.setattr(connections, "FULL_SECONDS", 0.01)
    sockets = bind("127.0.0.1", 0)
    host, port = sockets[0].getsockname()
    own = asyncio.get_running_loop()
    async with answering_while_loading(sockets, shares_port=False):
        with socket.socket() as client:
            client.setblocking(False)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            taken = []
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 20, limits[1]))
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.dup(client.fileno()))
                await own.sock_connect(client, (host, port))
                await asyncio.sleep(0.05)  # it is there, and cannot be let in
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for number in taken:
                    os.close(number)
            await own.sock_sendall(client, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(PATIENCE):
                assert (await own.sock_recv(client, 100)).startswith(b"HTTP/1.1 200 ")
    for sock in sockets:
        sock.close()


async def test_a_client_that_comes_while_workers_start_does_not_stop_the_loop(tmp_path):
    path = str(tmp_path / "a.sock")
    shared = bind_unix(path)
    async with answering_while_loading([shared], shares_port=True):
        of_worker = bind_beside(shared)
        # Else the loop would stand still after the first client, in an accept for the next one.
        assert not os.get_blocking(shared.fileno())
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
            session.get("http://localhost/ready") as response,
        ):
            assert (response.status, (await response.json())["status"]) == (503, "loading")
    of_worker.close()
    shared.close()


async def test_nobody_is_turned_away_when_the_server_takes_over():
    sockets = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}/ready"
    seen = []

    async def ask(session):
        while 200 not in seen[-20:]:
            async with session.get(url) as response:
                seen.append(response.status)

    async with aiohttp.ClientSession() as session, AsyncEngine(SIMULATED) as engine:
        async with answering_while_loading(sockets, shares_port=False):
            asking = [asyncio.create_task(ask(session)) for _ in range(4)]
            while len(seen) < 20:  # noqa: ASYNC110
                await asyncio.sleep(0)
            serving = listening(engine, sockets)
            await serving.__aenter__()
        await asyncio.gather(*asking)
        await serving.__aexit__(None, None, None)
    assert set(seen) == {200, 503}


async def test_an_engine_that_is_being_loaded_says_so_from_python():
    engine = AsyncEngine(SIMULATED)
    assert (await engine.ask(HealthCheck())).status == "loading"
    await engine.shutdown()


SLOW_TO_LOAD = """
import asyncio
from pathlib import Path
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.runner.simulated import SimulatedRunner


async def load(runner):
    while not Path({file!r}).exists():
        await asyncio.sleep(0.01)
    return runner.info


class Slow(FCFSScheduler):
    SimulatedRunner.load = load
"""


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--api-workers", "1"), marks=pytest.mark.dist)], ids=["one", "two"]
)
def test_the_port_answers_before_the_model_is_there(words, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_TO_LOAD.format(file=str(tmp_path / "go")))
    policy = f"{tmp_path / 'slow.py'}:Slow"
    command = (sys.executable, "-m", "aioserve", "--port", "0", "--runner", "simulated", *words)
    with started(*command, "--policy", policy, stderr=subprocess.PIPE) as process:
        for line in process.stderr:
            if found := re.search(r"(http://\S+)/ready", line):
                break
        read_lines(process)
        url = found[1]
        assert fetch(f"{url}/livez") == 200
        assert fetch(f"{url}/health") == fetch(f"{url}/ready") == 503
        (tmp_path / "go").touch()
        until(lambda: fetch(f"{url}/ready") == 200, "the server is ready")


def fetch(url: str) -> int:
    """The HTTP status of GET `url`."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
