"""Two nodes of Ray on this machine, each with processes of its own. For `make test-dist`."""

import asyncio
import json
import socket
import warnings
from collections.abc import Iterator

import aiohttp
import pytest

from tests.processes import COMPUTING_SECONDS

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="pip install 'ray[serve]'")
    from ray import serve
    from ray.cluster_utils import Cluster

    from aioserve.fleet.ray import build_app

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

MODEL = {
    "settings": {"runner.runner": "simulated", "runner.step_base_ms": 5.0},
    "num_replicas": 2,
    "router": "round_robin",
    "ray_actor_options": {"num_cpus": 0.1, "resources": {"card": 1}},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> Iterator[int]:
    """The direct port of an ingress on the head, whose two replicas are on a node each."""
    memory = 100 * 2**20
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": memory, "resources": {"card": 1}},
    )
    cluster.add_node(num_cpus=2, object_store_memory=memory, resources={"card": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        direct = free_port()
        app = build_app(
            {
                "models": [MODEL | {"direct_port": direct}],
                "ingress_actor_options": {"num_cpus": 0.1},
            }
        )
        serve.run(app, name="aioserve", route_prefix="/")
        yield direct
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


async def test_replicas_of_two_nodes_serve_behind_one_ingress(port: int) -> None:
    body = {"prompt": "Who is there?", "max_tokens": 4, "ignore_eos": True, "stream": True}
    async with (
        asyncio.timeout(COMPUTING_SECONDS),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):

        async def ask() -> int:
            async with http.post("/v1/completions", json=body) as response:
                assert response.status == 200
                lines = [line async for line in response.content if line.startswith(b"data: {")]
                return sum(len(json.loads(line[6:])["choices"][0]["text"]) > 0 for line in lines)

        assert all(await asyncio.gather(*(ask() for _ in range(8))))
        async with http.get("/metrics") as response:
            text = await response.text()
        labels = '{model="embedded",router="round_robin"}'
        assert f"aioserve_router_replicas{labels} 2.0" in text
        alive = [node for node in ray.nodes() if node["Alive"]]
        assert len(alive) == 2
        free = ray.available_resources()
        assert free.get("card", 0) == 0  # each node has one, and a replica of its own
