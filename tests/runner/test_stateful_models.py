"""Models whose layers have states: the tokens of `transformers`, however their texts are computed.

In pieces, beside others, from prefixes, after preemptions, with slots for few states or for one.
"""

import asyncio
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import (
    CacheConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.draft_length import DraftLength
from aioserve.features.states.cpu_memory import choose_num_state_slots
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu.load import load_on_cpu
from tests.kit import (
    executor_of,
    expected_tokens,
    greedy,
    make_prompts,
    small_config,
    stats_of,
    tokens_of,
)
from tests.models import edit_config, make_model
from tests.slow import mostly_slow

_GATED_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
#: Linear attention with convolutions beside attention; state spaces alone, of which the first go
#: on by one token at a time; convolutions.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_GATED_DELTA, "num_hidden_layers": 4},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]},
}
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=mostly_slow(MODELS, but=["qwen3_5_text", "mamba2"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        request.param, tmp_path_factory.mktemp(request.param), **MODELS[request.param]
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    """What `transformers` generates for each prompt alone."""
    return expected_tokens(model, NUM_TOKENS)


def slots_of(engine: AsyncEngine) -> Tensor:
    """Of some layer."""
    states = executor_of(engine)._model.states
    return next(slots for layer in states._layers for slots in layer.slots.values())


async def test_texts_and_their_continuations_get_the_tokens_of_transformers(
    model: Path, expected: list[list[int]]
) -> None:
    prompts = make_prompts()
    cache = CacheConfig(num_kv_blocks=128, num_state_slots=40)
    async with AsyncEngine(small_config(model, cache=cache)) as engine:
        found = await asyncio.gather(*(tokens_of(engine, p, greedy(NUM_TOKENS)) for p in prompts))
        assert found == expected
        num_hits = stats_of(engine).num_prefix_hit_tokens
        for prompt, tokens in zip(prompts, expected, strict=True):  # their next turns
            assert await tokens_of(engine, prompt + tokens[:-1], greedy(1)) == tokens[-1:]
        stats = stats_of(engine)
        # Each goes on where its last whole block ended.
        whole = sum((len(prompt) + NUM_TOKENS - 2) // 16 * 16 for prompt in prompts)
        assert stats.num_prefix_hit_tokens - num_hits == whole
        assert stats.num_free_state_slots == stats.num_state_slots
        slots = weakref.ref(slots_of(engine))
    assert slots() is None  # whenever the modules go


@pytest.mark.parametrize(
    ("cache", "scheduler"),
    [
        pytest.param(
            CacheConfig(num_kv_blocks=16, block_size=8, watermark=0, num_state_slots=4),
            SchedulerConfig(policy="fcfs", max_num_seqs=4),
            id="preempted",
        ),
        pytest.param(
            CacheConfig(num_kv_blocks=64, num_state_slots=1),
            SchedulerConfig(policy="chunked_prefill", max_num_seqs=4),
            id="one slot",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            CacheConfig(num_kv_blocks=64, block_size=4),
            SchedulerConfig(
                policy="chunked_prefill", max_num_seqs=3, max_num_batched_tokens=7, pipeline_depth=2
            ),
            id="two steps ahead",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_pressure_changes_no_token(
    model: Path, expected: list[list[int]], cache: CacheConfig, scheduler: SchedulerConfig
) -> None:
    config = small_config(model, cache=cache, scheduler=scheduler)
    async with AsyncEngine(config) as engine:
        for _ in range(2):
            found = await asyncio.gather(
                *(tokens_of(engine, prompt, greedy(NUM_TOKENS)) for prompt in make_prompts())
            )
            assert found == expected


IN_PIECES = SchedulerConfig(policy="chunked_prefill", max_num_batched_tokens=24, max_num_seqs=4)
PREEMPTED = SchedulerConfig(policy="fcfs", max_num_seqs=4)


@pytest.mark.parametrize(
    ("model", "scheduler"),
    mostly_slow(product(MODELS, [IN_PIECES, PREEMPTED]), but=[("qwen3_5_text", PREEMPTED)]),
    indirect=["model"],
)
async def test_wrong_drafts_leave_no_trace_in_states(
    model: Path, scheduler: SchedulerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled; of few tokens, whose n-grams come again and go on in other ways."""

    def stepped(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6  # every draft pays, however busy this machine is

    monkeypatch.setattr(DraftLength, "stepped", stepped)
    ngram = SpeculationConfig(speculative_method="ngram", prompt_lookup_min=1)
    cache = CacheConfig(num_kv_blocks=28, block_size=8, watermark=0, num_state_slots=6)
    way = {"allowed_token_ids": [100, 103, 106], "seed": 3}
    said = []
    for speculation in (SpeculationConfig(speculative_method="none"), ngram):
        config = small_config(model, cache=cache, scheduler=scheduler, speculation=speculation)
        async with AsyncEngine(config) as engine:
            replies = (
                tokens_of(
                    engine,
                    prompt,
                    msgspec.structs.replace(greedy(40), temperature=number % 2, **way),
                )
                for number, prompt in enumerate(make_prompts())
            )
            said.append(await asyncio.gather(*replies))
            stats = stats_of(engine)
            assert stats.num_free_state_slots == stats.num_state_slots
    assert said[0] == said[1]
    assert stats.num_draft_tokens - 100 > stats.num_accepted_tokens > 30
    assert stats.num_preemptions or scheduler.policy != "fcfs"


async def test_no_draft_is_made_unasked_where_states_would_be_kept_twice(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLength, "stepped", lambda *_: None)  # every draft would pay
    auto = SpeculationConfig(speculative_method="auto", prompt_lookup_min=1)
    way = {"allowed_token_ids": [100, 103, 106]}
    async with AsyncEngine(small_config(model, speculation=auto)) as engine:
        await tokens_of(engine, make_prompts()[0], msgspec.structs.replace(greedy(40), **way))
        assert stats_of(engine).num_draft_tokens == 0


async def test_too_little_memory_for_a_state_is_refused_in_a_line(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"not one (request|KV block) fits: "):
        async with AsyncEngine(small_config(model, cache=CacheConfig(kv_cache_gib=1e-6))):
            pass


async def test_a_model_with_states_is_refused_as_a_draft_model(model: Path, tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path, num_hidden_layers=1)
    speculation = SpeculationConfig(speculative_method="draft", draft_model=str(model))
    with pytest.raises(ConfigError, match="whose layers have states, cannot make drafts"):
        async with AsyncEngine(small_config(plain, speculation=speculation)):
            pass


async def test_slots_for_a_model_without_states_are_refused(tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path, num_hidden_layers=1)
    cache = CacheConfig(num_kv_blocks=16, num_state_slots=4)
    with pytest.raises(ConfigError, match=r"no layer of .*Llama.* has a state: leave it out"):
        async with AsyncEngine(small_config(plain, cache=cache)):
            pass


@pytest.mark.parametrize(
    ("kind", "field", "value", "told"),
    [
        ("mamba2", "chunk_size", 0, "makes no sense: chunk_size is 0, not a number"),
        ("mamba2", "state_size", 4 * 10**8, "sense: state_size is 400000000, not a number"),
        ("mamba2", "conv_kernel", -4, "conv_kernel is -4, which must be a whole number"),
        ("qwen3_5_text", "linear_conv_kernel_dim", 0, "_dim is 0, which must be a whole number"),
    ],
)
def test_sizes_that_make_no_sense_are_named(
    tmp_path: Path, kind: str, field: str, value: int, told: str
) -> None:
    config = small_config(edit_config(make_model(kind, tmp_path, **MODELS[kind]), **{field: value}))
    with pytest.raises(ConfigError, match=told):
        load_on_cpu(config, ModelInfo(config.model))


@pytest.mark.parametrize(
    ("method", "max_num_seqs", "num_slots"),
    [("none", 2, 6), ("ngram", 2, 6), ("ngram", 64, 5), ("auto", 64, 10)],
)
def test_memory_is_set_aside_for_the_states_before_drafts(
    method: Any, max_num_seqs: int, num_slots: int
) -> None:
    """Of memory for ten states: three slots for each request that may run, and a second state for
    each that may have drafts in a step.
    """
    config = EngineConfig(
        cache=CacheConfig(kv_cache_gib=10 / 1024),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        speculation=SpeculationConfig(speculative_method=method),
    )
    assert choose_num_state_slots(config, 1 << 20, is_shared=False) == num_slots
