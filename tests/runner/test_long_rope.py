"""LongRoPE: `max_model_len` chooses the factors, whichever requests a step holds."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioserve import AsyncEngine
from aioserve.config import ModelConfig, SpeculationConfig
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.drafts import find_draft
from aioserve.model_source.info import ModelInfo
from aioserve.runner.models.long_rope import has_long_factors, with_factors_chosen
from tests.gguf_written import WRITTEN, make_written
from tests.greedy import GreedyReference
from tests.kit import greedy, small_config, tokens_of
from tests.models import make_model
from tests.slow import mostly_slow

ORIGINAL, NUM_TOKENS = 48, 12
SHORT = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8]
LONG = [2.0, 3.0, 4.5, 6.0, 8.0, 11.0, 15.0, 20.0]
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
#: Fused; with heads that turn in part; with latent attention.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {
        "sliding_window": None,
        "original_max_position_embeddings": ORIGINAL,
        "rope_parameters": ROPE
        | {"partial_rotary_factor": 0.5, "short_factor": SHORT[:4], "long_factor": LONG[:4]},
    },
    "minicpm3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}
BEYOND = [[7, 3, 9, 250, 4] * 14, list(range(100, 168)), [5, 80, 2] * 27]
WITHIN = [[7, 3, 9], list(range(100, 130)), [5]]


def make(kind: str, path: Path, **fields: Any) -> Path:
    return make_model(kind, path, **{"rope_parameters": ROPE} | KINDS[kind] | fields)


def serve(
    path: Path, prompts: list[list[int]], length: int, fused: bool = True, **sections: Any
) -> list[list[int]]:
    """The tokens of all prompts, at once and in pieces."""
    config = small_config(path, **sections)
    model = msgspec.structs.replace(config.model, max_model_len=length, fused=fused)

    async def ask() -> list[list[int]]:
        async with AsyncEngine(msgspec.structs.replace(config, model=model)) as engine:
            asked = (tokens_of(engine, prompt, greedy(NUM_TOKENS)) for prompt in prompts)
            return list(await asyncio.gather(*asked))

    return asyncio.run(ask())


def expected(path: Path, prompts: list[list[int]]) -> list[Any]:
    reference = GreedyReference(path, torch.float32)
    return [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("fused", mostly_slow([True, False], but=[True]))
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_beyond_the_original_length_turn_by_the_long_factors(
    kind: str, fused: bool, tmp_path: Path
) -> None:
    path = make(kind, tmp_path)
    assert serve(path, BEYOND, 128, fused) == expected(path, BEYOND)


@pytest.mark.parametrize("kind", KINDS)
def test_a_max_model_len_of_the_original_length_takes_the_short_factors(
    kind: str, tmp_path: Path
) -> None:
    path = make(kind, tmp_path)
    assert serve(path, WITHIN, ORIGINAL) == expected(path, WITHIN)


def test_short_requests_turn_by_the_long_factors_where_longer_ones_may_come(
    tmp_path: Path,
) -> None:
    path = make("llama", tmp_path / "model")
    found = serve(path, WITHIN, 128)
    always = make("llama", tmp_path / "long", rope_parameters=ROPE | {"short_factor": LONG})
    assert found == expected(always, WITHIN) != serve(path, WITHIN, ORIGINAL)


def test_a_gguf_file_turns_by_its_long_factors(tmp_path: Path) -> None:
    directory, path = make_written(WRITTEN["phi3-long"], tmp_path)
    prompts = [[token % 250 for token in prompt] for prompt in BEYOND]
    assert serve(path, prompts, 128) == expected(directory, prompts)


@pytest.mark.parametrize(("length", "prompts"), [(ORIGINAL, WITHIN), (128, BEYOND)])
def test_a_draft_model_turns_as_the_served_one(
    length: int, prompts: list[list[int]], tmp_path: Path
) -> None:
    path = make("llama", tmp_path)
    draft = SpeculationConfig(speculative_method="draft", draft_model=str(path))
    assert serve(path, prompts, length, speculation=draft) == expected(path, prompts)
    config = small_config(path, speculation=draft)
    model = msgspec.structs.replace(config.model, max_model_len=length)
    source = find_draft(config, ModelInfo(model))
    assert source is not None
    assert source.info.max_model_len == length


def test_dynamic_angles_are_served_up_to_the_original_length(tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    rope["original_max_position_embeddings"] = 64
    path = make_model("llama", tmp_path, rope_parameters=rope)
    with pytest.raises(ConfigError, match="dynamic rotary embeddings are served up to 64"):
        serve(path, WITHIN, 65)


def test_the_original_length_is_the_last_one_of_the_short_factors(tmp_path: Path) -> None:
    path = make("phi3", tmp_path)
    config = ModelInfo(ModelConfig(model=str(path))).hf_config
    assert not has_long_factors(config, ORIGINAL)
    assert with_factors_chosen(config, ORIGINAL) is config
    assert has_long_factors(config, ORIGINAL + 1)
    chosen = with_factors_chosen(config, ORIGINAL + 1)
    assert chosen.rope_parameters["short_factor"] == LONG[:4]
    assert config.rope_parameters["short_factor"] == SHORT[:4]
