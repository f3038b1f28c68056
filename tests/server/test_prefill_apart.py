"""One server computes prompts, another one replies, a proxy stands in front: the texts of one."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from aioserve import AsyncEngine, SamplingParams
from tests.processes import serving

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_factories=["uvloop"])]

EXAMPLE = Path(__file__).parents[2] / "examples/prefill_proxy.py"
PROMPTS = [f"Act {i}. Enter the king and {'many ' * (20 * i)}soldiers.\n" for i in range(1, 4)]


def load_proxy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prefill_proxy", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prefill_proxy"] = module
    spec.loader.exec_module(module)
    return module


async def test_two_processes_give_the_texts_of_one(tmp_path: Path) -> None:
    expected = []
    async with AsyncEngine() as engine:
        for prompt in PROMPTS:
            async for output in engine.generate(
                prompt, SamplingParams(temperature=0, max_tokens=24, output_kind="final_only")
            ):
                last = output
            expected.append(last.text)
    shared = ("--kv-connector", "disk", "--kv-connector-path", str(tmp_path), "--port", "0")
    with (
        serving(*shared, "--kv-role", "producer") as (_, prefill),
        serving(*shared) as (_, decode),
    ):
        async with (
            TestServer(load_proxy().make_app(prefill, decode)) as proxy,
            aiohttp.ClientSession() as session,
        ):
            for prompt, text in zip(PROMPTS, expected, strict=True):
                body = {
                    "model": "embedded",
                    "prompt": prompt,
                    "temperature": 0,
                    "max_tokens": 24,
                }
                async with session.post(proxy.make_url("/v1/completions"), json=body) as reply:
                    assert (await reply.json())["choices"][0]["text"] == text
            async with session.get(f"{decode}/metrics") as reply:
                metrics = await reply.text()
    fetched = re.search(r"^aioserve_kv_connector_fetched_tokens_total (\S+)", metrics, re.MULTILINE)
    assert fetched is not None
    assert float(fetched[1]) > 100
