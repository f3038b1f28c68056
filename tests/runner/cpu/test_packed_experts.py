"""Experts of GGUF files stay quantized: they are multiplied as stored, or unpacked once."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve import AsyncEngine
from aioserve.config import ModelConfig
from aioserve.features.quantized import FORMATS
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.quantized_weight import (
    quantized_experts,
    stored_experts,
    unpacked_in_turn,
)
from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.cpu.models import load_model_on_cpu
from aioserve.runner.cpu.products import BlockLinear
from tests.gguf_models import write_gguf
from tests.gguf_written import WRITTEN, make_written
from tests.greedy import GreedyReference
from tests.kit import greedy, small_config, tokens_of
from tests.models import make_model
from tests.slow import mostly_slow
from tests.variants import needs_kernels

pytestmark = needs_kernels

NUM_TOKENS = 10
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
WITH_EXPERTS = [name for name, case in WRITTEN.items() if case.metadata.get("expert_count")]
#: Of which some tensors are whole blocks of 32 inputs; Llama 4 keeps experts in a way of its own.
PACKED = [name for name in WITH_EXPERTS if name not in ("nemotron_h_moe-latent", "llama4_text")]
#: Whose experts are served on fused weights.
FUSED = ("mixtral", "qwen3_moe", "gpt_oss", "qwen3vlmoe")


def load(path: Path, **settings: Any) -> Any:
    """The module of `transformers` for a model on disk."""
    source = ModelInfo(ModelConfig(model=str(path))).source
    return source.load_module(torch.float32, torch.device("cpu"), "eager", **settings)


def reference(file: Path) -> GreedyReference:
    """`transformers` on the weights of `file`, unpacked by the package gguf."""
    module, place = load(file), file.parent / "unpacked"
    module.config.eos_token_id = module.generation_config.eos_token_id = None  # go on and on
    module.save_pretrained(place)
    return GreedyReference(place, torch.float32)


def check(file: Path, vocab_size: int) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(length)] for length in (1, 9, 30, 45)]
    expected = reference(file)

    async def serve() -> list[list[int]]:
        async with AsyncEngine(small_config(file)) as engine:
            asked = (tokens_of(engine, prompt, greedy(NUM_TOKENS)) for prompt in prompts)
            return list(await asyncio.gather(*asked))

    found = asyncio.run(serve())
    assert found == [expected.tokens(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("name", mostly_slow(PACKED, but=["gpt_oss", "nemotron_h_moe"]))
def test_experts_of_a_file_stay_as_they_are_until_they_are_unpacked(
    name: str, tmp_path: Path
) -> None:
    """Whichever way `transformers` has them: what stands in for them gives the same numbers."""
    _, file = make_written(WRITTEN[name], tmp_path, kind="Q8_0")
    packed, whole = load(file, keeps_blocks=True), load(file)
    stored = {n for n, p in packed.named_parameters() if stored_experts(p) is not None}
    assert any("exp" in parameter for parameter in stored)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode(), unpacked_in_turn(packed):
        assert torch.equal(packed(ids).logits, whole(ids).logits)
    assert {n for n, p in packed.named_parameters() if stored_experts(p) is not None} == stored


@pytest.mark.parametrize(
    "name", mostly_slow(WITH_EXPERTS, but=["gpt_oss", "qwen3_moe", "mixtral", "olmoe"])
)
def test_tokens_are_those_of_the_unpacked_experts(name: str, tmp_path: Path) -> None:
    _, file = make_written(WRITTEN[name], tmp_path, kind="Q4_1")
    check(file, 256)


@pytest.mark.parametrize("kind", mostly_slow(list(FORMATS), but=["Q4_K", "Q5_0", "Q6_K"]))
def test_experts_of_every_format_are_multiplied_as_they_are_stored(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_model(
        "qwen3_moe",
        tmp_path / "float",
        moe_intermediate_size=256,
        num_experts=4,
        num_experts_per_tok=2,
        **SIZES,
    )
    file = write_gguf(directory, tmp_path / "m.gguf", kind_of=lambda name: kind)
    check(file, 512)
    config = small_config(file).model
    with caplog.at_level("INFO"):
        model: Any = load_model_on_cpu(config, ModelInfo(config))
    assert f"weights, {kind}, multiplied as they are stored" in caplog.text
    assert isinstance(model.decoder, WholeDecoder)
    experts = model.decoder.layers[0].mlp
    assert {type(part) for part in experts.products} == {BlockLinear}


def test_experts_that_are_unpacked_are_told_so(tmp_path: Path) -> None:
    _, file = make_written(WRITTEN["llama4_text"], tmp_path, kind="Q8_0")
    source = ModelInfo(ModelConfig(model=str(file))).source
    module = load(file, keeps_blocks=True)
    experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
    assert not [p for p in module.parameters() if stored_experts(p) is not None]
    assert source.num_bytes(4, keeps_blocks=True) > 4 * experts


@pytest.mark.parametrize("name", FUSED)
def test_memory_is_told_as_the_experts_are_stored(name: str, tmp_path: Path) -> None:
    """Where all are of a format; gates of one and ups of another are told so, and unpacked."""
    _, file = make_written(WRITTEN[name], tmp_path, kind="Q8_0")
    source = ModelInfo(ModelConfig(model=str(file))).source
    module = load(file, keeps_blocks=True)
    told = source.num_bytes(4, keeps_blocks=True)
    few = sum(
        weight.num_elements
        for parameter in module.parameters()
        for weight in quantized_experts(parameter) or ()
    )
    assert few
    assert source.num_bytes(4) - told > 2.5 * few
