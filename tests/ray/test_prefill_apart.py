"""Prompts on one process and replies on another of a real local Ray. For `make test-dist`."""

import asyncio
import json
import os
import re
import signal
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.fleet.ray import build_app
from tests.processes import COMPUTING_SECONDS

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="pip install 'ray[serve]'")
    from ray import serve

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

PROMPT = "What news, my lord? " * 12  # several KV blocks
REAL = {"model.dtype": "float32", "cache.num_kv_blocks": 512}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A Ray of our own with a replica for each role, each scaled by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    cpu = {"num_cpus": 0.1}
    scaling = {
        **{"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 100.0},
        **{"downscale_delay_s": 0.0, "look_back_period_s": 10.5},
    }
    blocks = {"cache.kv_connector": "disk", "cache.kv_connector_path": str(tmp_path)}
    model = {
        "settings": REAL | blocks,
        "router": "prefill_decode",
        "groups": [{"role": role, "autoscaling": scaling} for role in ("prefill", "decode")],
        "ray_actor_options": cpu,
    }
    try:
        app = build_app({"models": [model], "ingress_actor_options": cpu})
        serve.run(app, name="aioserve", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas(role: str) -> list[psutil.Process]:
    """The processes of the engines with a role."""
    name = f"ray::ServeReplica:aioserve:engine-embedded-{role}"
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "".join(process.info["cmdline"] or []).startswith(name)
    ]


async def texts_of_one_engine(asked: list[dict[str, Any]]) -> list[str]:
    texts = []
    async with AsyncEngine(EngineConfig.load(None, list(REAL.items()))) as engine:
        for body in asked:
            fields = {name: value for name, value in body.items() if name != "prompt"}
            text = ""
            async for output in engine.generate(body["prompt"], SamplingParams(**fields)):
                text += output.text
            texts.append(text)
    return texts


async def streamed(http: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of a stream, and its usage."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    events = []
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
    assert not any("error" in event for event in events), events[-1]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return text, events[-1]["usage"]


async def test_two_processes_reply_as_one_engine_and_one_is_left_of_each_role(url: str) -> None:
    asked: list[dict[str, Any]] = [
        {"max_tokens": 20, "temperature": 0},
        {"max_tokens": 20, "temperature": 0.9, "seed": 7},
        {"max_tokens": 30, "temperature": 0, "presence_penalty": 1.5},
        {"max_tokens": 60, "temperature": 0, "stop": ("lord",)},
    ]
    asked = [body | {"prompt": f"{i}. {PROMPT}"} for i, body in enumerate(asked)]
    expected = await texts_of_one_engine(asked)
    patience = aiohttp.ClientTimeout(COMPUTING_SECONDS)
    async with aiohttp.ClientSession(url, timeout=patience) as http:
        found = await asyncio.gather(*(streamed(http, body) for body in asked))
        assert [text for text, _ in found] == expected
        for _, usage in found:
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        async with http.get("/metrics") as response:
            text = await response.text()
        [moved] = re.findall(r"aioserve_router_moved_requests_total{.*} (.*)", text)
        assert float(moved) == len(asked)
        await asyncio.sleep(12)  # Ray looks every ten seconds whether fewer are enough
        assert len(replicas("prefill")) == len(replicas("decode")) == 1

        [victim] = replicas("prefill")
        os.kill(victim.pid, signal.SIGKILL)
        late = {"prompt": f"after that. {PROMPT}", "max_tokens": 20, "temperature": 0}
        [right] = await texts_of_one_engine([late])
        text, _ = await streamed(http, late)  # computed where replies are made
        assert text == right
