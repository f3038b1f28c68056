"""Layers with states, or with a sliding window, beside a KV connector: the tokens of `transformers`
in any case.

A block of K and V is of use only with the state at its end: both are kept, and found together.
Behind N tokens layers with a window need the blocks of the last window alone, others those of all.
"""

import itertools
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
WITH_WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
#: Linear attention beside attention; convolutions beside it; state spaces alone, so that blocks
#: have no K and V; both in one layer.
WITH_STATES: dict[str, dict[str, Any]] = {
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
MODELS = WITH_STATES | WITH_WINDOWS
NUM_TOKENS = 24
with_states = pytest.mark.parametrize(
    "model", mostly_slow(WITH_STATES, but=["qwen3_5_text"]), indirect=True
)
with_windows = pytest.mark.parametrize(
    "model", mostly_slow(WITH_WINDOWS, but=["gemma3_text"]), indirect=True
)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param  # by its name a test knows its kind
    return make_model(request.param, folder, **MODELS[request.param])


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What `transformers` generates for each prompt alone."""
    return expected_tokens(model, NUM_TOKENS)


def settings(model: Path, **cache: Any) -> EngineConfig:
    """Few blocks of each kind, and slots for few states, so that others take their places."""
    few = {"num_window_blocks": 26} if model.name in WITH_WINDOWS else {"num_state_slots": 5}
    known = {"num_kv_blocks": 36, "block_size": 8, "watermark": 0.0, **few}
    cache = {"kv_connector_gib": 1 / 64, **known, **cache}
    return small_config(
        model,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(policy="fcfs", max_num_seqs=4),
    )


def plenty(model: Path) -> dict[str, Any]:
    """Blocks and slots for all."""
    of_kind = {"num_window_blocks": 200} if model.name in WITH_WINDOWS else {"num_state_slots": 40}
    return {"num_kv_blocks": 200, **of_kind}


@pytest.mark.parametrize(
    ("model", "kind", "depth"),
    mostly_slow(
        itertools.product(MODELS, ["memory", "disk"], [1, 2]),
        but=[
            ("qwen3_5_text", "disk", 2),
            ("gemma3_text", "memory", 1),
        ],
    ),
    indirect=["model"],
)
async def test_blocks_states_and_windows_from_outside_give_the_same_tokens(
    model: Path, expected: list[list[int]], kind: str, depth: int, tmp_path: Path
) -> None:
    config = settings(model, **(on_disk(tmp_path) if kind == "disk" else {"kv_connector": kind}))
    scheduler = msgspec.structs.replace(config.scheduler, pipeline_depth=depth)
    async with AsyncEngine(msgspec.structs.replace(config, scheduler=scheduler)) as engine:
        for _ in range(3):
            assert await run_all(engine, NUM_TOKENS) == expected
        await next_turns(engine, expected)
        if model.name in WITH_WINDOWS:
            assert stats_of(engine).num_window_blocks == 26
        stats = connector_stats(engine)
        assert stats.num_hit_tokens > (0 if model.name in WITH_WINDOWS else 100)
        assert stats.num_bytes_loaded > 0
        assert stats.num_failures == 0


@with_states
async def test_a_second_engine_goes_on_where_the_first_has_ended(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """At the end of the last whole block of each reply."""
    config = settings(model, **on_disk(tmp_path), **plenty(model))
    async with AsyncEngine(config) as engine:
        assert await run_all(engine, NUM_TOKENS) == expected
        await tokens_of(engine, [5], greedy(2))  # whose steps save what the others have left
        assert connector_stats(engine).num_failures == 0
    async with AsyncEngine(config) as engine:
        for prompt, tokens in zip(make_prompts(), expected, strict=True):
            async for output in engine.generate([*prompt, *tokens, 5], greedy(1)):
                assert output.num_cached_tokens == (len(prompt) + NUM_TOKENS - 1) // 8 * 8
        await next_turns(engine, expected)


@with_windows
async def test_a_second_engine_reads_no_more_of_windows_than_they_show(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    config = settings(model, **on_disk(tmp_path), **plenty(model))
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


@with_states
async def test_a_consumer_goes_on_behind_the_prompt_that_a_producer_has_computed(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """As soon as the producer has answered: as when a router has a prompt computed apart."""
    cache = {**on_disk(tmp_path), **plenty(model)}
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


@pytest.mark.parametrize("model", mostly_slow(MODELS, but=["mamba", "gemma3_text"]), indirect=True)
async def test_what_policies_swap_comes_back_with_its_state_or_window(
    model: Path, expected: list[list[int]]
) -> None:
    before = OffloadsAtEveryTurn.num_offloads, OffloadsAtEveryTurn.num_prefetches
    few = {"num_kv_blocks": 44, "num_window_blocks": 40}
    if model.name in WITH_STATES:
        few = {"num_state_slots": 8}
    config = settings(model, kv_connector="memory", **few)
    policy = f"{OffloadsAtEveryTurn.__module__}:{OffloadsAtEveryTurn.__name__}"
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=4)
    async with AsyncEngine(msgspec.structs.replace(config, scheduler=scheduler)) as engine:
        for _ in range(2):
            assert await run_all(engine, NUM_TOKENS) == expected
        assert connector_stats(engine).num_hit_tokens > 0
    assert OffloadsAtEveryTurn.num_offloads > before[0] + 10
    assert OffloadsAtEveryTurn.num_prefetches > before[1]


@pytest.mark.parametrize(
    ("model", "damage"),
    mostly_slow(
        itertools.product(MODELS, ["truncated", "gone", "changed"]),
        but=[("mamba", "changed"), ("mamba", "gone"), ("gemma3_text", "truncated")],
    ),
    indirect=["model"],
)
async def test_a_lost_or_damaged_state_or_window_means_a_shorter_find(
    model: Path, expected: list[list[int]], damage: str, tmp_path: Path
) -> None:
    config = settings(model, **on_disk(tmp_path), **plenty(model))
    async with AsyncEngine(config) as engine:
        await run_all(engine, NUM_TOKENS)
    has_windows = model.name in WITH_WINDOWS
    files = files_in(tmp_path, "*.windows.kv" if has_windows else "*.states.kv")
    assert len(files) > (20 if has_windows else 8)
    for file in files[:: 2 if has_windows else 1]:
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
        assert has_windows or stats.num_hit_tokens == 0
        assert bool(stats.num_failures) == (damage != "gone")


@with_states
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
@pytest.mark.parametrize("model", ["qwen3_5_text", *WITH_WINDOWS], indirect=True)
async def test_each_of_two_ranks_keeps_its_part_of_a_state_or_window(
    model: Path, expected: list[list[int]], kind: str, tmp_path: Path
) -> None:
    config = settings(model, **(on_disk(tmp_path) if kind == "disk" else {"kv_connector": kind}))
    runner = RunnerConfig(threads=2, tensor_parallel_size=2)
    async with AsyncEngine(msgspec.structs.replace(config, runner=runner)) as engine:
        for _ in range(2):
            assert await run_all(engine, NUM_TOKENS) == expected
        await next_turns(engine, expected)
        assert connector_stats(engine).num_hit_tokens > 0
