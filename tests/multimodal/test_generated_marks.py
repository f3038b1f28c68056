"""Replies in which the model itself writes what stands for an image in prompts."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve import AsyncEngine, EngineConfig, MultimodalPrompt, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from tests.seeing_models import NUM_TOKENS, SEEING_KINDS, Seeing
from tests.slow import mostly_slow

pytest.importorskip("PIL")
# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


def writing_marks(model: Seeing, path: Path, text: str, images: list[Any]) -> Seeing:
    """The same, but for the head: wherever it said what it says first here, it says the mark."""
    first, *_ = model.tokens(text, images)
    writing = copy.copy(model)
    writing.model, writing.path = copy.deepcopy(model.model), path
    head = writing.model.get_output_embeddings()
    with torch.no_grad():
        head.weight[model.model.config.image_token_id] = 1.5 * head.weight[first]
    writing.model.save_pretrained(path)
    for file in model.path.glob("*.json"):
        if file.name not in ("config.json", "generation_config.json"):
            (path / file.name).write_bytes(file.read_bytes())
    return writing


@pytest.mark.parametrize("kind", mostly_slow(SEEING_KINDS, but=["gemma4_small", "qwen2_5_vl"]))
async def test_marks_in_replies_and_those_without_images_are_read_as_transformers_reads_them(
    kind: str, tmp_path: Path
) -> None:
    model = Seeing(kind, tmp_path / "model")
    (text, images), *_ = model.prompts()
    model = writing_marks(model, tmp_path / "writing", text, images)
    expected, mark = model.tokens(text, images), model.model.config.image_token_id
    assert expected[0] == mark
    assert set(expected) - {mark}
    config = EngineConfig(
        model=ModelConfig(model=str(model.path), dtype="float32"),
        runner=RunnerConfig(threads=1),
        cache=CacheConfig(num_kv_blocks=100, block_size=8),
        scheduler=SchedulerConfig(policy="chunked_prefill", options={"chunk_size": 80}),
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    of_prompt = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    ids = [*range(500, 510), mark, 520, mark, *range(530, 535)]
    async with AsyncEngine(config) as engine:
        tokens = [
            token
            async for output in engine.generate(MultimodalPrompt(text, images), params)
            for token in output.token_ids
        ]
        told = [
            entry.logprob
            async for output in engine.generate(ids, of_prompt)
            for entry in (output.prompt_logprobs or [])[1:]
        ]
    assert tokens == expected
    logits = model.model(input_ids=torch.tensor([ids])).logits[0]
    logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert told == pytest.approx(logprobs.tolist(), abs=1e-3)
