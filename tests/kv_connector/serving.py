"""What tests of connectors ask of an engine, and where a directory's files are."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncEngine
from aioserve.features.kv_connector import OffloadingConnector
from aioserve.kv_cache import KVConnectorStats
from tests.kit import greedy, make_prompts, tokens_of


def load_at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have connectors not hear what the scheduler says of step times."""
    unknown = property(lambda _: None, lambda _, __: None)
    monkeypatch.setattr(OffloadingConnector, "step_time", unknown)


def on_disk(path: Path) -> dict[str, Any]:
    """The settings of a cache whose connector keeps blocks in this directory."""
    return {"kv_connector": "disk", "kv_connector_path": str(path)}


def files_in(path: Path, names: str) -> list[Path]:
    """The files of blocks in a connector's directory that have such names, sorted."""
    return sorted(path.glob(f"*/*/{names}"))


def connector_stats(engine: AsyncEngine) -> KVConnectorStats:
    """What the connector of an engine, which has one, has counted."""
    connector = engine.metrics.kv_connector.connector
    assert connector is not None
    return connector.make_stats()


async def run_all(engine: AsyncEngine, num_tokens: int) -> list[list[int]]:
    """The replies to all of `make_prompts`, asked at once."""
    return await asyncio.gather(
        *(tokens_of(engine, prompt, greedy(num_tokens)) for prompt in make_prompts())
    )


async def next_turns(engine: AsyncEngine, expected: list[list[int]]) -> None:
    """Each conversation goes on, and gets the last token that is known of it."""
    for prompt, tokens in zip(make_prompts(), expected, strict=True):
        assert await tokens_of(engine, prompt + tokens[:-1], greedy(1)) == tokens[-1:]
