"""Layers with a sliding window beside a KV connector: the tokens of `transformers` in any case.

Behind N tokens they need the blocks of the last window alone, the other layers those of all N.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig
from tests.engine.pausing_policy import OffloadsAtEveryTurn
from tests.kit import (
    expected_tokens,
    greedy,
    make_prompts,
    small_config,
    stats_of,
    tokens_of,
)
from tests.kv_connector.serving import connector_stats, files_in, next_turns, on_disk, run_all
from tests.models import make_model
from tests.slow import mostly_slow

pytestmark = [
    pytest.mark.asyncio(loop_factories=["uvloop"]),
    pytest.mark.usefixtures("at_any_price"),
]

WINDOW = 24
#: Every layer has a window, so that the main pool has nothing; one of three has none.
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=mostly_slow(MODELS, but=["mistral", "gemma3_text"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        request.param, tmp_path_factory.mktemp(request.param), **MODELS[request.param]
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What `transformers` generates for each prompt alone."""
    return expected_tokens(model, NUM_TOKENS)


def settings(model: Path, **cache: Any) -> EngineConfig:
    """Few blocks of both kinds, so that others take their places."""
    known = {"num_kv_blocks": 36, "num_window_blocks": 26, "block_size": 8, "watermark": 0.0}
    cache = {"kv_connector_gib": 1 / 64, **known, **cache}
    return small_config(
        model,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(policy="fcfs", max_num_seqs=4),
    )


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_windows_from_outside_give_the_same_tokens(
    model: Path, expected: list[list[int]], kind: str, depth: int, tmp_path: Path
) -> None:
    config = settings(model, **(on_disk(tmp_path) if kind == "disk" else {"kv_connector": kind}))
    scheduler = msgspec.structs.replace(config.scheduler, pipeline_depth=depth)
    async with AsyncEngine(msgspec.structs.replace(config, scheduler=scheduler)) as engine:
        for _ in range(3):
            assert await run_all(engine, NUM_TOKENS) == expected
        await next_turns(engine, expected)
        assert stats_of(engine).num_window_blocks == 26
        stats = connector_stats(engine)
        assert stats.num_hit_tokens > 0
        assert stats.num_bytes_loaded > 0
        assert stats.num_failures == 0


async def test_a_second_engine_reads_no_more_of_windows_than_they_show(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    config = settings(model, **on_disk(tmp_path), num_kv_blocks=200, num_window_blocks=200)
    async with AsyncEngine(config) as engine:
        assert await run_all(engine, NUM_TOKENS) == expected
        await tokens_of(engine, [5], greedy(2))  # whose steps save what the others have left
    prompt, tokens = make_prompts()[4], expected[4]
    size = files_in(tmp_path, "*.windows.kv")[0].stat().st_size
    async with AsyncEngine(config) as engine:
        whole = (len(prompt) + NUM_TOKENS - 1) // 8
        async for output in engine.generate([*prompt, *tokens, 5], greedy(1)):
            assert output.num_cached_tokens == 8 * whole
        num_seen = whole - (8 * whole - WINDOW + 1) // 8
        files = [f for f in files_in(tmp_path, "*.kv") if "windows" not in f.name]
        num_bytes = num_seen * size + (whole * files[0].stat().st_size if files else 0)
        assert 0.9 * num_bytes < connector_stats(engine).num_bytes_read <= num_bytes
        await next_turns(engine, expected)


@pytest.mark.parametrize("damage", ["truncated", "gone"])
async def test_a_lost_or_damaged_window_means_a_shorter_find(
    model: Path, expected: list[list[int]], damage: str, tmp_path: Path
) -> None:
    config = settings(model, **on_disk(tmp_path), num_kv_blocks=200, num_window_blocks=200)
    async with AsyncEngine(config) as engine:
        await run_all(engine, NUM_TOKENS)
    files = files_in(tmp_path, "*.windows.kv")
    assert len(files) > 20
    for file in files[::2]:
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-7])
    async with AsyncEngine(config) as engine:
        await next_turns(engine, expected)
        assert bool(connector_stats(engine).num_failures) == (damage != "gone")


async def test_what_policies_swap_comes_back_with_its_window(
    model: Path, expected: list[list[int]]
) -> None:
    before = OffloadsAtEveryTurn.num_offloads, OffloadsAtEveryTurn.num_prefetches
    config = settings(model, kv_connector="memory", num_kv_blocks=44, num_window_blocks=40)
    policy = f"{OffloadsAtEveryTurn.__module__}:{OffloadsAtEveryTurn.__name__}"
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=4)
    async with AsyncEngine(msgspec.structs.replace(config, scheduler=scheduler)) as engine:
        for _ in range(2):
            assert await run_all(engine, NUM_TOKENS) == expected
        assert connector_stats(engine).num_hit_tokens > 0
    assert OffloadsAtEveryTurn.num_offloads > before[0] + 10
    assert OffloadsAtEveryTurn.num_prefetches > before[1]


@pytest.mark.dist
@pytest.mark.parametrize("kind", mostly_slow(["memory", "disk"], but=["disk"]))
async def test_each_of_two_ranks_keeps_its_part_of_a_window(
    model: Path, expected: list[list[int]], kind: str, tmp_path: Path
) -> None:
    config = settings(model, **(on_disk(tmp_path) if kind == "disk" else {"kv_connector": kind}))
    runner = RunnerConfig(threads=2, tensor_parallel_size=2)
    async with AsyncEngine(msgspec.structs.replace(config, runner=runner)) as engine:
        for _ in range(2):
            assert await run_all(engine, NUM_TOKENS) == expected
        await next_turns(engine, expected)
        assert connector_stats(engine).num_hit_tokens > 0
