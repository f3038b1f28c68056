"""What goes wrong with one request of a step ends that request, and its neighbours' tokens stay."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import RequestError, RequestFailedError
from tests.models import VOCAB_SIZE, make_model
from tests.runner.driver import random_prompt

BROKEN_TOKEN = 7  # of the damaged model: NaN in its row of the embedding
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model("llama", tmp_path_factory.mktemp("damaged"))
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        module.get_input_embeddings().weight[BROKEN_TOKEN] = float("nan")
    module.save_pretrained(path)
    return path


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True),
        cache=CacheConfig(num_kv_blocks=128, block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=8),
        runner=RunnerConfig(threads=1),
    )


async def tokens_of(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams = GREEDY
) -> list[int]:
    """All that the model says to a prompt."""
    found: list[int] = []
    async for output in engine.generate(prompt, params):
        found += output.token_ids
    return found


def prompts() -> Iterator[list[int]]:
    """Without the broken token."""
    for seed in range(4):
        yield [token_id for token_id in random_prompt(20, seed=seed) if token_id != BROKEN_TOKEN]


async def test_weights_that_are_no_numbers_are_named_at_load(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncEngine(config_of(damaged)):
        pass
    assert "hold NaN or infinity: model.embed_tokens.weight. " in caplog.text


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_row_of_nan_fails_alone(damaged: Path, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_p=0.9 if temperature else 1.0,
        seed=3,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=tuple(range(20, VOCAB_SIZE)),
    )
    async with AsyncEngine(config_of(damaged)) as engine:
        expected = [await tokens_of(engine, prompt, params) for prompt in prompts()]
        broken = tokens_of(engine, [1, 2, BROKEN_TOKEN], params)
        others = [tokens_of(engine, prompt, params) for prompt in prompts()]
        failure, *found = await asyncio.gather(broken, *others, return_exceptions=True)
        assert found == expected
        assert isinstance(failure, RequestFailedError)
        assert "NaN" in str(failure)


ODD: list[dict[str, Any]] = [
    {"top_p": 1e-50},
    {"temperature": 1e-50},
    {"temperature": 1e-50, "top_p": 1e-50, "top_k": 3},
    {"logit_bias": {5: -100, 6: 100}},
    {"repetition_penalty": 0.01, "top_p": 0.9},
]


async def test_numbers_that_float32_does_not_hold_harm_nobody(damaged: Path) -> None:
    allowed = tuple(range(100, 140))
    base = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False, "seed": 1}
    async with AsyncEngine(config_of(damaged)) as engine:
        expected = [await tokens_of(engine, prompt) for prompt in prompts()]
        for fields in ODD:
            params = SamplingParams(**base, **fields, allowed_token_ids=allowed)
            odd = tokens_of(engine, [1, 2, 3], params)
            said, *found = await asyncio.gather(odd, *(tokens_of(engine, p) for p in prompts()))
            assert found == expected, fields
            assert len(said) == NUM_TOKENS
            assert set(said) <= set(allowed)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 2.01), ("temperature", 1e39), ("repetition_penalty", 1e-300)],
)
def test_absurd_numbers_are_refused_with_the_range(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name} must be between") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
