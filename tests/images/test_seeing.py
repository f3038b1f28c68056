"""Models that see: the greedy tokens of `transformers`, whatever else is in the batch."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, Illustrated, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from tests.seeing_models import PLACEHOLDERS, SEEING_KINDS, make_seeing_model, picture

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Reference]] = {}

    def get(kind: str) -> tuple[Path, Reference]:
        if kind not in made:
            path = make_seeing_model(kind, tmp_path_factory.mktemp(kind))
            made[kind] = (path, Reference(kind, path))
        return made[kind]

    return get


class Reference:
    """The same model, by `generate`."""

    def __init__(self, kind: str, path: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        from aioserve.images.families import FAMILIES
        from aioserve.images.processing import _load
        from aioserve.model_info import ModelInfo

        self.model: Any = AutoModelForImageTextToText.from_pretrained(path).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.processor = _load(FAMILIES[kind], ModelInfo(ModelConfig(model=str(path))), tokenizer)

    def tokens(self, text: str, images: Sequence[Any], num_tokens: int = NUM_TOKENS) -> list[int]:
        inputs = self.processor(
            text=[text], images=[list(images)] if images else None, return_tensors="pt"
        )
        output = self.model.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return found


def make_config(path: Path, **scheduler: Any) -> EngineConfig:
    policy = scheduler.pop("policy", "chunked_prefill")
    cache = CacheConfig(num_kv_blocks=scheduler.pop("num_kv_blocks", 200), block_size=16)
    return EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", fused=scheduler.pop("fused", True)),
        runner=RunnerConfig(threads=1),
        cache=cache,
        scheduler=SchedulerConfig(policy=policy, **scheduler),
    )


async def collect(engine: AsyncEngine, prompt: Any, num_tokens: int = NUM_TOKENS) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    tokens: list[int] = []
    async for output in engine.generate(prompt, params):
        tokens += output.token_ids
    return tokens


def prompts_of(kind: str) -> list[tuple[str, list[Any]]]:
    mark = PLACEHOLDERS[kind]
    a, b, c, d = (
        picture(i, *size) for i, size in enumerate([(70, 40), (30, 30), (25, 90), (64, 64)])
    )
    return [
        (f"{mark} What is this?", [a]),
        (f"Say: {mark} and {mark}, what?", [b, c]),
        (f"{mark}{mark} to be {mark} or not {mark} to be", [d, a, b, c]),
        ("No picture at all, my lord", []),
        (f"The same again {mark}", [a]),
    ]


@pytest.mark.parametrize("kind", SEEING_KINDS)
async def test_tokens_are_those_of_generate(models: Any, kind: str) -> None:
    path, reference = models(kind)
    options = {"chunk_size": 37}
    async with AsyncEngine(make_config(path, options=options)) as engine:
        prompts = prompts_of(kind)
        found = await asyncio.gather(
            *(collect(engine, Illustrated(text, images)) for text, images in prompts)
        )
    for (text, images), tokens in zip(prompts, found, strict=True):
        assert tokens == reference.tokens(text, images), text
