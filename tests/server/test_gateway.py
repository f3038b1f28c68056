"""`/metrics` as the endpoint picker of an inference gateway reads it.

The picker's side is what its metrics extractor does: of a gauge the newest sample, of adapters the
sample with the greatest value, the rest by labels.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.core import Metric, Sample
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import PATIENCE
from tests.server.serving import Server

# The model of adapters, and a server for it.
from tests.server.test_lora_routes import base, paths, serving  # noqa: F401

#: What pickers ask for unless they are told other names.
WAITING, RUNNING = "vllm:num_requests_waiting", "vllm:num_requests_running"
USAGE, OLD_USAGE = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"
ADAPTERS, CACHE = "vllm:lora_requests_info", "vllm:cache_config_info"


class Endpoint(NamedTuple):
    """What a picker knows of a model server."""

    num_waiting: int
    num_running: int
    kv_usage: float
    loaded: set[str]
    awaited: set[str]
    max_adapters: int
    block_size: int
    num_blocks: int


def picked(text: str) -> Endpoint:
    """What the picker reads of a scrape; a family that is missing, or no gauge, is an error."""
    families = {family.name: family for family in text_string_to_metric_families(text)}

    def newest(name: str) -> float:
        family: Metric = families[name]
        assert family.type == "gauge"
        return max(family.samples, key=lambda sample: sample.timestamp or 0).value

    adapters: Sample = max(families[ADAPTERS].samples, key=lambda sample: sample.value)
    [cache] = families[CACHE].samples
    assert families[ADAPTERS].type == families[CACHE].type == "gauge"
    assert newest(USAGE) == newest(OLD_USAGE)
    return Endpoint(
        int(newest(WAITING)),
        int(newest(RUNNING)),
        newest(USAGE),
        {name for name in adapters.labels["running_lora_adapters"].split(",") if name},
        {name for name in adapters.labels["waiting_lora_adapters"].split(",") if name},
        int(adapters.labels["max_lora"]),
        int(cache.labels["block_size"]),
        int(cache.labels["num_gpu_blocks"]),
    )


async def test_a_picker_sees_queue_batch_and_kv_cache_fill_and_empty(start_server) -> None:
    scheduler, cache = {"max_num_seqs": 2}, {"num_kv_blocks": 64, "block_size": 16}
    async with start_server(
        scheduler=scheduler, cache=cache, runner={"step_base_ms": 20}
    ) as server:

        async def look(server: Server) -> Endpoint:
            return picked((await server.get("/metrics")).body.decode())

        assert await look(server) == Endpoint(0, 0, 0.0, set(), set(), 32, 16, 64)
        asked = [
            asyncio.create_task(server.complete([5 + i] * 100, max_tokens=30, ignore_eos=True))
            for i in range(3)
        ]
        async with asyncio.timeout(PATIENCE):
            while (seen := await look(server)).num_running < 2 or not seen.num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (seen.num_waiting, seen.num_running) == (1, 2)
        assert 14 / 64 <= seen.kv_usage <= 1  # a share, whatever "percentage" its name says
        await asyncio.gather(*asked)
        async with asyncio.timeout(PATIENCE):
            while (seen := await look(server)).num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert seen.kv_usage == 0


async def test_a_picker_sees_which_adapters_are_in_memory(
    base: Path,  # noqa: F811
    paths: dict[str, Path],  # noqa: F811
) -> None:
    async with serving(base, {"a": paths["a"]}) as client:

        async def look() -> Endpoint:
            status, text = await client.get("/metrics")
            assert status == 200
            return picked(text)

        assert (await look()).loaded == {"a"}
        await client.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": str(paths["b"])})
        seen = await look()
        assert (seen.loaded, seen.awaited, seen.max_adapters) == ({"a", "b"}, set(), 32)
        await client.tokens("b")  # an adapter is asked for as a model
        await client.post("/v1/unload_lora_adapter", {"lora_name": "a"})
        assert (await look()).loaded == {"b"}


@pytest.mark.parametrize("name", [WAITING, RUNNING, USAGE, ADAPTERS, CACHE])
async def test_each_name_of_the_page_is_served_from_the_first_scrape_on(
    server: Server, name: str
) -> None:
    page = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
    assert f"`{name}`" in page
    text = (await server.get("/metrics")).body.decode()
    assert any(family.name == name for family in text_string_to_metric_families(text))
