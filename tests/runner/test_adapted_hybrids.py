"""Adapters on models with states: beside requests without any, the tokens of merged weights."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve import AsyncEngine
from aioserve.config import AdapterConfig, CacheConfig
from tests.adapters import ATTENTION, make_adapter, merge
from tests.greedy import GreedyReference
from tests.kit import greedy, make_prompts, small_config, stats_of
from tests.models import make_model
from tests.runner.test_stateful_models import MODELS
from tests.slow import mostly_slow

#: Linear layers outside of those with states.
TARGETS = {
    "qwen3_5_text": (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "lfm2": ("q_proj", "k_proj", "v_proj", "w1", "w2", "w3"),
}
NUM_TOKENS = 12


@pytest.mark.parametrize("kind", mostly_slow(TARGETS, but=["qwen3_5_text"]))
async def test_a_batch_with_and_without_adapters_says_what_merged_weights_say(
    kind: str, tmp_path: Path
) -> None:
    base = make_model(kind, tmp_path / "base", **MODELS[kind])
    models, adapters = {None: base}, {}
    for seed, name in enumerate(("one", "two")):
        path = make_adapter(base, tmp_path / name, seed=seed, targets=TARGETS[kind])
        adapters[name], models[name] = path, merge(base, path, tmp_path / f"{name}-merged")
    prompts = make_prompts()[3:7]
    expected: dict[str | None, list[Any]] = {}
    for name, path in models.items():
        reference = GreedyReference(path, torch.float32)
        expected[name] = [reference.tokens(prompt, NUM_TOKENS) for prompt in prompts]
    config = small_config(
        base,
        adapters=AdapterConfig(lora=tuple(f"{name}={path}" for name, path in adapters.items())),
        cache=CacheConfig(num_kv_blocks=128, num_state_slots=40),
    )
    async with AsyncEngine(config) as engine:

        async def say(prompt: list[int], adapter: str | None, num_tokens: int) -> list[int]:
            stream = engine.generate(prompt, greedy(num_tokens), adapter=adapter)
            return [token async for output in stream for token in output.token_ids]

        asked = [(number, name) for number in range(len(prompts)) for name in models]
        found = await asyncio.gather(*(say(prompts[i], name, NUM_TOKENS) for i, name in asked))
        assert found == [expected[name][i] for i, name in asked]
        before = stats_of(engine).num_prefix_hit_tokens
        for i, name in asked:  # their next turns go on from snapshots of their own adapters' states
            tokens = expected[name][i]
            assert await say(prompts[i] + tokens[:-1], name, 1) == tokens[-1:]
        assert stats_of(engine).num_prefix_hit_tokens > before
    assert len({tuple(expected[name][0]) for name in models}) == len(models)
