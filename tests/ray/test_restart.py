"""A changed application on a real local Ray, under requests. For `make test-dist`."""

import asyncio
import contextlib
import socket
import warnings
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest

from tests.processes import COMPUTING_SECONDS

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="pip install 'ray[serve]'")
    from ray import serve

    from aioserve.fleet.ray import build_app

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

NUM_TOKENS = 120  # of a stream: six seconds, longer than Ray waits for what it does not know


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def deploy(direct: int, max_num_seqs: int) -> None:
    settings = {
        "runner.runner": "simulated",
        "runner.step_base_ms": 50.0,
        "scheduler.max_num_seqs": max_num_seqs,
    }
    cpu = {"num_cpus": 0.1}
    model = {"settings": settings, "num_replicas": 2, "ray_actor_options": cpu}
    app = {
        "models": [model | {"direct_port": direct}],
        "num_ingress_replicas": 2,
        "ingress_actor_options": cpu,
    }
    serve.run(build_app(app), name="aioserve", route_prefix="/")


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Of Ray's proxy and of the ingresses, of an application with two of each."""
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20)
    try:
        proxy, direct = free_port(), free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": proxy})
        deploy(direct, 100)
        yield proxy, direct
    finally:
        serve.shutdown()
        ray.shutdown()


def parts() -> set[int]:
    """The processes of ingresses and replicas."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if name_of(process).startswith("ray::ServeReplica:aioserve")
    }


def name_of(process: psutil.Process) -> str:
    """What a process calls itself; empty for one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "".join(process.cmdline()[:1])
    return ""


class Clients:
    """Of one port: streams one after the other, and short requests, on connections of their own and
    on kept ones.
    """

    def __init__(self, port: int) -> None:
        self.num_streams = self.num_short = 0
        self._url = f"http://127.0.0.1:{port}"
        self._is_over = False
        self._tasks = [
            asyncio.create_task(self._ask(is_stream=True, is_kept=False)),
            asyncio.create_task(self._ask(is_stream=True, is_kept=True)),
            asyncio.create_task(self._ask(is_stream=False, is_kept=False)),
            asyncio.create_task(self._ask(is_stream=False, is_kept=True)),
        ]

    async def stop(self) -> None:
        """Raises what any request was refused or broken with."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, *, is_stream: bool, is_kept: bool) -> None:
        body: dict[str, Any] = {"prompt": "Hello", "ignore_eos": True, "stream": is_stream}
        body["max_tokens"] = NUM_TOKENS if is_stream else 1
        connector = aiohttp.TCPConnector(force_close=not is_kept)
        timeout = aiohttp.ClientTimeout(COMPUTING_SECONDS)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as http:
            while not self._is_over:
                async with http.post("/v1/completions", json=body) as response:
                    text = await response.text()
                    assert response.status == 200, text
                if is_stream:
                    assert text.endswith("data: [DONE]\n\n"), text[-300:]
                    self.num_streams += 1
                else:
                    self.num_short += 1
                    await asyncio.sleep(0.05)


async def test_a_changed_application_refuses_and_breaks_no_request(ports: tuple[int, int]) -> None:
    old = parts()
    assert len(old) == 4
    ways = [Clients(port) for port in ports]
    await asyncio.sleep(1.0)
    await asyncio.to_thread(deploy, ports[1], 101)
    async with asyncio.timeout(COMPUTING_SECONDS):
        while old & parts():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert len(parts()) == 4
    for way in ways:
        await way.stop()
        assert way.num_streams > 1
        assert way.num_short > 10
