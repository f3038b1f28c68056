"""The request log: what was served, as a workload that can be run again."""

import asyncio
from pathlib import Path

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.errors import ConfigError
from aioserve.lab.workloads.traces import read_trace


def make_config(path: Path) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated"), scheduler=SchedulerConfig(request_log=str(path))
    )


async def test_requests_are_read_back_as_they_came(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"

    async def ask(prompt: list[int], count: int, limit: float | None, user: str) -> None:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        async for _ in engine.generate(prompt, params, user=user, priority=count, timeout=limit):
            pass

    async with AsyncEngine(make_config(path)) as engine:
        await ask([5] * 7, 3, None, "ann")
        await asyncio.sleep(0.05)
        await asyncio.gather(ask([5] * 9, 2, 60.0, "bob"), ask([6] * 4, 40, None, ""))
    ann, bob, nobody = read_trace(path).requests
    assert (ann.num_prompt_tokens, ann.output_tokens, ann.user, ann.priority) == (7, 3, "ann", 3)
    assert (bob.num_prompt_tokens, bob.output_tokens, bob.user) == (9, 2, "bob")
    assert bob.timeout == pytest.approx(60.0)
    assert (nobody.num_prompt_tokens, nobody.output_tokens, nobody.user) == (4, 40, "")
    assert bob.arrival >= ann.arrival + 0.04  # a loop may have a grain of a millisecond


async def test_a_client_that_leaves_has_read_so_many_tokens(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    async with AsyncEngine(make_config(path)) as engine:
        stream = await engine.add_request([5] * 7, SamplingParams(max_tokens=500, ignore_eos=True))
        async with stream:
            await anext(aiter(stream))
    (request,) = read_trace(path).requests
    assert 1 <= request.output_tokens < 100


async def test_a_log_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    engine = AsyncEngine(make_config(tmp_path / "missing" / "requests.jsonl"))
    with pytest.raises(ConfigError, match="cannot write request log"):
        await engine.start()
