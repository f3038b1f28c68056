"""Weights that change beside a directory of KV blocks: each have their own folder there."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import CacheConfig
from aioserve.features.kv_connector import BlockDirectory
from tests.kit import greedy, make_prompts, small_config, tokens_of
from tests.kv_connector.serving import connector_stats, run_all
from tests.models import make_model
from tests.processes import PATIENCE

pytestmark = [
    pytest.mark.asyncio(loop_factories=["uvloop"]),
    pytest.mark.usefixtures("at_any_price"),
]

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("reload") / "one")


@pytest.fixture(scope="module")
def other(model: Path) -> Path:
    """The same model with other weights."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(model, model.parent / "two")
    weights = load_file(copy / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight.roll(1, 0).contiguous() if "embed" in name else weight
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def settings(model: Path, **cache: Any) -> EngineConfig:
    return small_config(model, cache=CacheConfig(num_kv_blocks=100, block_size=8, **cache))


async def expected_of(model: Path) -> list[list[int]]:
    """Without a connector."""
    async with AsyncEngine(settings(model)) as engine:
        return await run_all(engine, NUM_TOKENS)


def num_folders(path: Path) -> int:
    return len(list(path.iterdir()))


async def test_blocks_of_other_weights_are_other_files(
    model: Path, other: Path, tmp_path: Path
) -> None:
    first, second = await expected_of(model), await expected_of(other)
    assert first != second
    config = settings(model, kv_connector="disk", kv_connector_path=str(tmp_path))
    async with AsyncEngine(config) as engine:
        assert await run_all(engine, NUM_TOKENS) == first
        await engine.reload(str(other))
        assert num_folders(tmp_path) == 2
        assert await run_all(engine, NUM_TOKENS) == second
        assert connector_stats(engine).num_fetched_tokens == 0
        await engine.reload(str(model))
        assert await run_all(engine, NUM_TOKENS) == first
        assert connector_stats(engine).num_fetched_tokens > 100  # its files are still there
        assert connector_stats(engine).num_failures == 0
    async with AsyncEngine(settings(other, **_cache_of(config))) as engine:  # and those of others
        assert await run_all(engine, NUM_TOKENS) == second
        assert connector_stats(engine).num_fetched_tokens > 100
    assert num_folders(tmp_path) == 2


def _cache_of(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config.cache, name) for name in ("kv_connector", "kv_connector_path")}


async def test_what_was_being_read_when_weights_changed_is_not_used(
    model: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that waited for it is computed by the weights that came."""
    second = await expected_of(other)
    config = settings(model, kv_connector="disk", kv_connector_path=str(tmp_path))
    async with AsyncEngine(config) as engine:
        await run_all(engine, NUM_TOKENS)
    may_read, is_reading, read_one = threading.Event(), threading.Event(), BlockDirectory._read_one

    def slow(self: BlockDirectory, *arguments: Any) -> bool:
        is_reading.set()
        assert may_read.wait(PATIENCE)
        return read_one(self, *arguments)

    monkeypatch.setattr(BlockDirectory, "_read_one", slow)
    prompt = make_prompts()[4]
    async with AsyncEngine(config) as engine:
        waits = asyncio.create_task(tokens_of(engine, prompt, greedy(NUM_TOKENS)))
        await asyncio.to_thread(is_reading.wait, PATIENCE)
        await engine.reload(str(other))
        assert await waits == second[4]  # though its read has not ended
        may_read.set()
        assert await run_all(engine, NUM_TOKENS) == second


async def test_weights_without_a_folder_are_served_without_one(
    model: Path,
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    second = await expected_of(other)
    config = settings(model, kv_connector="disk", kv_connector_path=str(tmp_path))
    async with AsyncEngine(config) as engine:
        await run_all(engine, NUM_TOKENS)

        def no_folder(*_: Any) -> Path:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(BlockDirectory, "_make_folder", no_folder)
        await engine.reload(str(other))
        for _ in range(2):
            assert await run_all(engine, NUM_TOKENS) == second
        assert connector_stats(engine).num_fetched_tokens == 0
    assert sum("keeps no blocks of" in line for line in caplog.messages) == 1
    assert num_folders(tmp_path) == 1
