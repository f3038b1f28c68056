"""The parts of steps.py that could be wrong in silence: shapes, floors, steps, models."""

from pathlib import Path

import pytest
import torch
from make_model import SHAPES, make_model
from steps import Case, Floors, Shapes, StepBench, floor

from aioserve.config import ModelConfig
from aioserve.model_source.info import ModelInfo

SMALL = Case(decodes=3, context=40, prompt=70)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("2m", tmp_path_factory.mktemp("models") / "2m")


@pytest.fixture(scope="module")
def shapes(model: Path) -> Shapes:
    return Shapes.of(ModelInfo(ModelConfig(model=str(model))).hf_config, torch.bfloat16)


def test_every_weight_is_in_a_product_and_products_of_one_input_are_one(shapes: Shapes) -> None:
    assert shapes.products == [(192 + 2 * 64, 192), (192, 192), (2 * 512, 192), (192, 512)] * 4
    assert shapes.head == (2048, 192)
    assert shapes.kv_bytes_per_token == 4 * 2 * 64 * 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_floor_counts_each_token_of_context_once(
    dtype: torch.dtype, shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steps.READ_BYTES", 1 << 20)  # no matter how fast this machine is
    torch.set_num_threads(1)
    floors = Floors(shapes, dtype, is_widened=dtype.itemsize == 2)
    floors.bandwidth, floors.rate = 1.0, 1e30
    kv = shapes.kv_bytes_per_token
    assert floors.attention([(1, 100), (1, 50)]) == 150 * kv
    floors.bandwidth, floors.rate = 1e30, 1.0
    # three tokens that end at 10 see 8, 9 and 10 tokens
    assert floors.attention([(3, 10)]) == 27 * shapes.attention_flops
    linear, attention = floor(Case(2, 10, 7), 4, floors)
    assert linear > 0
    pairs = (10 + 10 + 1 + 2 + 3 + 4) + (10 + 10 + 5 + 6 + 7)
    assert attention == pairs * shapes.attention_flops


def test_widened_weights_are_read_in_two_bytes_and_multiplied_in_four(
    shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steps.READ_BYTES", 1 << 20)
    floors = Floors(shapes, torch.bfloat16, is_widened=True)
    floors.bandwidth, floors.rate = 100.0, 10000.0
    numbers = sum(a * b for a, b in [*shapes.products, shapes.head])
    assert floors.linear(1, 1).median == pytest.approx(numbers * 2 / 100)
    body = numbers - shapes.head[0] * shapes.head[1]
    head = shapes.head[0] * shapes.head[1]
    assert floors.linear(1000, 1).median == pytest.approx(2 * body * 1000 / 10000 + head * 2 / 100)


def test_a_case_runs_its_steps_and_leaves_an_empty_batch(model: Path, shapes: Shapes) -> None:
    bench = StepBench(
        model,
        threads=1,
        num_kv_tokens=SMALL.num_kv_tokens,
        kv_bytes_per_token=shapes.kv_bytes_per_token,
    )
    for _ in range(2):  # the blocks of the first are free for the second
        assert bench.measure(SMALL, chunk=32, min_seconds=0).median > 0
    bench.runner.close()


@pytest.mark.parametrize("shape", ["2m", "135m"])
def test_every_token_of_a_made_model_has_text(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | {"num_hidden_layers": 1})
    path = make_model(shape, tmp_path / "model")
    info = ModelInfo(ModelConfig(model=str(path)))
    tokenizer, text = info.tokenizer, "What news, my lord? \u00dcber w3000\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == info.vocab_size == SHAPES[shape]["vocab_size"]
    assert all(tokenizer.decode([i]) for i in range(4, info.vocab_size, 97))
    assert max(ids) < 2048  # the words that fill the vocabulary up are never met in a text
