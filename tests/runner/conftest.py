"""Tiny models, made once per test session, and runners on them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioserve.kernels import load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.loader import named_dtype
from tests.greedy import GreedyReference
from tests.models import make_model
from tests.runner.driver import BLOCK_SIZE, NUM_BLOCKS, Driver, make_config
from tests.variants import DTYPE, EVERY_VARIANT


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
        runner = load_on_cpu(config, ModelInfo(config.model))
        runners.append(runner)
        return Driver(runner, NUM_BLOCKS, BLOCK_SIZE)

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture(scope="session")
def generate_reference(model_path: Callable[..., Path]) -> Callable[..., Any]:
    """`generate_reference(kind, prompt, num_tokens)`: what equals its greedy tokens.

    `dtype=`: of another element type than the tests' own.
    """
    references: dict[tuple[str, str], GreedyReference] = {}

    def generate(kind: str, prompt: list[int], num_tokens: int, dtype: str = DTYPE) -> Any:
        if (kind, dtype) not in references:
            references[kind, dtype] = GreedyReference(model_path(kind), named_dtype(dtype))
        return references[kind, dtype].tokens(prompt, num_tokens)

    return generate


@pytest.fixture(params=EVERY_VARIANT)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The test runs on each variant of the kernels, and on plain torch."""
    monkeypatch.setenv("AIOSERVE_KERNELS", request.param)
    load_kernels.cache_clear()
    yield request.param
    load_kernels.cache_clear()
