"""Tiny models, made once per test session, and runners on them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import BLOCK_SIZE, NUM_BLOCKS, Driver, make_config

from aioserve.model_info import ModelInfo
from aioserve.runner.model_runner import ModelRunner
from tests.models import make_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`model_path(kind)`: the directory of a tiny model, made on first use."""
    made: dict[str, Path] = {}

    def path_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return path_of


@pytest.fixture
def make_driver(model_path: Callable[..., Path]) -> Iterator[Callable[..., Driver]]:
    """`make_driver(kind)`: a driver of a fresh runner."""
    runners = []

    def make(kind: str = "llama", **model: Any) -> Driver:
        config = make_config(model_path(kind), **model)
        runner = ModelRunner(config, ModelInfo(config.model))
        runner.load()
        runners.append(runner)
        return Driver(runner, NUM_BLOCKS, BLOCK_SIZE)

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def generate_reference(model_path: Callable[..., Path]) -> Callable[..., list[int]]:
    """`generate_reference(kind, prompt, num_tokens)`: greedy tokens by `transformers.generate`."""
    from transformers import AutoModelForCausalLM

    models: dict[str, Any] = {}

    def generate(kind: str, prompt: list[int], num_tokens: int) -> list[int]:
        if kind not in models:
            models[kind] = AutoModelForCausalLM.from_pretrained(
                model_path(kind), dtype=torch.float32
            )
        ids = torch.tensor([prompt])
        output = models[kind].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return generate
