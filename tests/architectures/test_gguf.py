"""GGUF files of every architecture, through the real engine: the tokens of their directories."""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest
import torch

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import ModelConfig
from tests.gguf_written import WRITTEN, make_written
from tests.greedy import GreedyReference
from tests.kit import greedy, small_config, tokens_of

NUM_TOKENS = 12
MAX_LEN = 64  # the original length of the one with LongRoPE


@pytest.mark.architectures
@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_served_with_the_tokens_of_its_directory(name: str, tmp_path: Path) -> None:
    directory, path = make_written(WRITTEN[name], tmp_path)
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 256) for _ in range(length)] for length in (1, 9, 30, 45)]
    reference = GreedyReference(directory, torch.float32)
    expected = [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]
    model = ModelConfig(
        model=str(path), dtype="float32", max_model_len=MAX_LEN, skip_tokenizer_init=True
    )
    config = msgspec.structs.replace(small_config(path), model=model)
    found = asyncio.run(_serve(config, prompts))
    assert found == expected
    assert len({token for tokens in found for token in tokens}) > 3, "it says always the same"


async def _serve(config: EngineConfig, prompts: list[list[int]]) -> list[list[int]]:
    async with AsyncEngine(config) as engine:
        asked = (tokens_of(engine, prompt, greedy(NUM_TOKENS)) for prompt in prompts)
        return list(await asyncio.gather(*asked))
