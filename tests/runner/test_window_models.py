"""Models with sliding windows: the tokens of `transformers`, with blocks for little but windows.

In pieces, beside others, from prefixes, after preemptions, two steps ahead, with guesses.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import (
    CacheConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.draft_length import DraftLength
from aioserve.features.spec_decode.model_drafter import ModelDraftLength
from tests.kit import expected_tokens, greedy, make_prompts, small_config, stats_of, tokens_of
from tests.models import make_model
from tests.slow import mostly_slow

WINDOW = 24
#: Every layer has a window; one of three has none; every other one has none, and there are sinks.
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_oss": {},
}
NUM_TOKENS = 24
#: At block size 8, four requests of 88 tokens have 44 blocks, less than half of which fit here.
CACHE = CacheConfig(num_kv_blocks=64, block_size=8, num_window_blocks=21)


@pytest.fixture(autouse=True)
def every_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does depends on how quick the machine is."""

    def stepped(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        pass

    for kind in (DraftLength, ModelDraftLength):
        monkeypatch.setattr(kind, "stepped", stepped)


@pytest.fixture(scope="module", params=mostly_slow(MODELS, but=["mistral", "gemma3_text"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        request.param, tmp_path_factory.mktemp(request.param), **MODELS[request.param]
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    """What `transformers` generates for each prompt alone."""
    return expected_tokens(model, NUM_TOKENS)


async def test_texts_and_their_continuations_get_the_tokens_of_transformers(
    model: Path, expected: list[list[int]]
) -> None:
    prompts = make_prompts()
    cache = CacheConfig(num_kv_blocks=128, block_size=8, num_window_blocks=80)
    async with AsyncEngine(small_config(model, cache=cache)) as engine:
        found = await asyncio.gather(*(tokens_of(engine, p, greedy(NUM_TOKENS)) for p in prompts))
        assert found == expected
        num_hits = stats_of(engine).num_prefix_hit_tokens
        for prompt, tokens in zip(prompts[-2:], expected[-2:], strict=True):  # their next turns
            assert await tokens_of(engine, prompt + tokens[:-1], greedy(1)) == tokens[-1:]
        stats = stats_of(engine)
        whole = sum((len(prompt) + NUM_TOKENS - 2) // 8 * 8 for prompt in prompts[-2:])
        assert stats.num_prefix_hit_tokens - num_hits == whole
        assert stats.num_window_blocks == 80
        assert stats.num_used_window_blocks == 0


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="chunks"),
        pytest.param(
            {
                "cache": CacheConfig(
                    num_kv_blocks=18, block_size=8, watermark=0, num_window_blocks=28
                ),
                "scheduler": SchedulerConfig(policy="fcfs", max_num_seqs=4),
            },
            id="preempted",
        ),
        pytest.param(
            {
                "cache": CacheConfig(num_kv_blocks=64, block_size=4, num_window_blocks=24),
                "scheduler": SchedulerConfig(
                    policy="chunked_prefill",
                    max_num_seqs=3,
                    max_num_batched_tokens=7,
                    pipeline_depth=2,
                ),
            },
            id="two steps ahead",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "speculation": SpeculationConfig(speculative_method="ngram", prompt_lookup_min=1),
            },
            id="guesses",
        ),
        pytest.param(
            {"cache": CacheConfig(num_kv_blocks=64, kv_cache_dtype="int8", num_window_blocks=16)},
            id="codes",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_pressure_changes_no_token(
    model: Path, expected: list[list[int]], sections: dict[str, Any]
) -> None:
    config = small_config(model, **{"cache": CACHE, **sections})
    if config.cache.kv_cache_dtype == "int8":  # compared with itself, with one pool for all layers
        expected = await alone(small_config(model, cache=CacheConfig(kv_cache_dtype="int8")))
    async with AsyncEngine(config) as engine:
        for _ in range(2):
            found = await asyncio.gather(
                *(tokens_of(engine, prompt, greedy(NUM_TOKENS)) for prompt in make_prompts())
            )
            assert found == expected
        stats = stats_of(engine)
        assert stats.num_used_window_blocks == 0
        assert config.cache.num_kv_blocks != 18 or stats.num_preemptions
        assert "speculation" not in sections or stats.num_draft_tokens > stats.num_accepted_tokens


@pytest.mark.slow
async def test_a_drafting_model_guesses_for_a_model_with_windows(
    model: Path, expected: list[list[int]]
) -> None:
    """By the same weights, so that most guesses are right; it keeps all blocks of its own."""
    speculation = SpeculationConfig(speculative_method="draft", draft_model=str(model))
    async with AsyncEngine(small_config(model, cache=CACHE, speculation=speculation)) as engine:
        found = await asyncio.gather(
            *(tokens_of(engine, prompt, greedy(NUM_TOKENS)) for prompt in make_prompts())
        )
        assert found == expected
        stats = stats_of(engine)
        assert stats.num_accepted_tokens > 20
        assert stats.num_window_blocks == 21


async def alone(config: EngineConfig) -> list[list[int]]:
    """What each prompt gets that nobody runs beside."""
    async with AsyncEngine(config) as engine:
        return [await tokens_of(engine, prompt, greedy(NUM_TOKENS)) for prompt in make_prompts()]


async def test_too_few_blocks_for_a_window_are_refused_in_a_line(tmp_path: Path) -> None:
    mistral = make_model("mistral", tmp_path, num_hidden_layers=1)
    cache = CacheConfig(num_kv_blocks=64, block_size=8, num_window_blocks=6)
    config = small_config(mistral, cache=cache)
    with pytest.raises(ConfigError, match="a request needs up to 7 blocks for layers with a"):
        async with AsyncEngine(config):
            pass


async def test_window_blocks_for_a_model_without_windows_are_refused(tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"no layer of .*Llama.* has a sliding window shorter"):
        async with AsyncEngine(small_config(plain, cache=CACHE)):
            pass


async def test_a_model_that_has_slept_has_one_pool_where_it_had_one(
    model: Path, expected: list[list[int]]
) -> None:
    """Too little memory for the steps of the longest request makes one pool at first."""
    cache = CacheConfig(block_size=8, kv_cache_gib=1 / 2048)
    scheduler = SchedulerConfig(policy="chunked_prefill", max_num_seqs=4)
    config = small_config(model, cache=cache, scheduler=scheduler)
    long = msgspec.structs.replace(config.model, max_model_len=None)
    async with AsyncEngine(msgspec.structs.replace(config, model=long)) as engine:
        assert stats_of(engine).num_window_blocks == 0
        for _ in range(2):
            found = await asyncio.gather(
                *(tokens_of(engine, prompt, greedy(NUM_TOKENS)) for prompt in make_prompts())
            )
            assert found == expected
            await engine.sleep(weights=True)
            await engine.wake()
