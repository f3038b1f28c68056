"""Models whose layers have states, beside a KV connector: the tokens of `transformers` in any case.

A block of K and V is of use only with the state at its end: both are kept, and found together.
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
    tokens_of,
)
from tests.kv_connector.serving import connector_stats, files_in, next_turns, on_disk, run_all
from tests.models import make_model
from tests.slow import mostly_slow

pytestmark = [
    pytest.mark.asyncio(loop_factories=["uvloop"]),
    pytest.mark.usefixtures("at_any_price"),
]

#: Linear attention beside attention; convolutions beside it; state spaces alone, so that blocks
#: have no K and V; both in one layer.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_hidden_layers": 4,
    },
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {"state_size": 16},
    "falcon_h1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "mamba_d_ssm": 128,
    },
}
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=mostly_slow(MODELS, but=["qwen3_5_text", "mamba"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        request.param, tmp_path_factory.mktemp(request.param), **MODELS[request.param]
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What `transformers` generates for each prompt alone."""
    return expected_tokens(model, NUM_TOKENS)


def settings(model: Path, **cache: Any) -> EngineConfig:
    """Few blocks, and slots for few states, so that others take their places."""
    known = {"num_kv_blocks": 36, "num_state_slots": 5, "block_size": 8, "watermark": 0.0}
    cache = {"kv_connector_gib": 1 / 64, **known, **cache}
    return small_config(
        model,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(policy="fcfs", max_num_seqs=4),
    )


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_blocks_and_states_from_outside_give_the_same_tokens(
    model: Path, expected: list[list[int]], kind: str, depth: int, tmp_path: Path
) -> None:
    config = settings(model, **(on_disk(tmp_path) if kind == "disk" else {"kv_connector": kind}))
    scheduler = msgspec.structs.replace(config.scheduler, pipeline_depth=depth)
    async with AsyncEngine(msgspec.structs.replace(config, scheduler=scheduler)) as engine:
        for _ in range(3):
            assert await run_all(engine, NUM_TOKENS) == expected
        await next_turns(engine, expected)
        stats = connector_stats(engine)
        assert stats.num_hit_tokens > 100
        assert stats.num_bytes_loaded > 0
        assert stats.num_failures == 0


async def test_a_second_engine_goes_on_where_the_first_has_ended(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """At the end of the last whole block of each reply."""
    config = settings(model, **on_disk(tmp_path), num_kv_blocks=200, num_state_slots=40)
    async with AsyncEngine(config) as engine:
        assert await run_all(engine, NUM_TOKENS) == expected
        await tokens_of(engine, [5], greedy(2))  # whose steps save what the others have left
        assert connector_stats(engine).num_failures == 0
    async with AsyncEngine(config) as engine:
        for prompt, tokens in zip(make_prompts(), expected, strict=True):
            async for output in engine.generate([*prompt, *tokens, 5], greedy(1)):
                assert output.num_cached_tokens == (len(prompt) + NUM_TOKENS - 1) // 8 * 8
        await next_turns(engine, expected)


async def test_a_consumer_goes_on_behind_the_prompt_that_a_producer_has_computed(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """As soon as the producer has answered: as when a router has a prompt computed apart."""
    cache = {**on_disk(tmp_path), "num_kv_blocks": 200, "num_state_slots": 40}
    async with (
        AsyncEngine(settings(model, **cache, kv_role="producer")) as producer,
        AsyncEngine(settings(model, **cache, kv_role="consumer")) as consumer,
    ):
        for prompt, tokens in zip(make_prompts()[:5], expected, strict=False):
            assert await tokens_of(producer, prompt, greedy(1)) == tokens[:1]
            found: list[int] = []
            async for output in consumer.generate(prompt, greedy(NUM_TOKENS)):
                found += output.token_ids
            assert found == tokens
            assert output.num_cached_tokens == (len(prompt) - 1) // 8 * 8


async def test_what_policies_swap_comes_back_with_its_state(
    model: Path, expected: list[list[int]]
) -> None:
    before = OffloadsAtEveryTurn.num_offloads, OffloadsAtEveryTurn.num_prefetches
    config = settings(model, kv_connector="memory", num_state_slots=8)
    policy = f"{OffloadsAtEveryTurn.__module__}:{OffloadsAtEveryTurn.__name__}"
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=4)
    async with AsyncEngine(msgspec.structs.replace(config, scheduler=scheduler)) as engine:
        for _ in range(2):
            assert await run_all(engine, NUM_TOKENS) == expected
        assert connector_stats(engine).num_hit_tokens > 0
    assert OffloadsAtEveryTurn.num_offloads > before[0] + 10
    assert OffloadsAtEveryTurn.num_prefetches > before[1]


@pytest.mark.parametrize("damage", ["truncated", "gone", "changed"])
async def test_a_lost_or_damaged_state_means_a_shorter_find(
    model: Path, expected: list[list[int]], damage: str, tmp_path: Path
) -> None:
    config = settings(model, **on_disk(tmp_path), num_kv_blocks=200, num_state_slots=40)
    async with AsyncEngine(config) as engine:
        await run_all(engine, NUM_TOKENS)
    states = files_in(tmp_path, "*.states.kv")
    assert len(states) > 8
    for file in states:
        content = file.read_bytes()
        if damage == "gone":
            file.unlink()
        elif damage == "truncated":
            file.write_bytes(content[:-7])
        else:
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    async with AsyncEngine(config) as engine:
        await next_turns(engine, expected)
        stats = connector_stats(engine)
        assert stats.num_hit_tokens == 0
        assert bool(stats.num_failures) == (damage != "gone")


async def test_a_full_disk_is_served_without_new_states(
    model: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def no_space(fd: int, buffers: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", no_space)
    async with AsyncEngine(settings(model, **on_disk(tmp_path))) as engine:
        for _ in range(2):
            assert await run_all(engine, NUM_TOKENS) == expected


@pytest.mark.dist
@pytest.mark.parametrize("kind", mostly_slow(["memory", "disk"], but=["disk"]))
async def test_each_of_two_ranks_keeps_its_part(kind: str, tmp_path: Path) -> None:
    model = make_model("qwen3_5_text", tmp_path / "model", **MODELS["qwen3_5_text"])
    expected = expected_tokens(model, NUM_TOKENS)
    config = settings(
        model, **(on_disk(tmp_path / "kv") if kind == "disk" else {"kv_connector": kind})
    )
    runner = RunnerConfig(threads=2, tensor_parallel_size=2)
    async with AsyncEngine(msgspec.structs.replace(config, runner=runner)) as engine:
        for _ in range(2):
            assert await run_all(engine, NUM_TOKENS) == expected
        await next_turns(engine, expected)
        assert connector_stats(engine).num_hit_tokens > 0
