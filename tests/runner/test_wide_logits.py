"""Logits are the head's sums in float32, whatever the type of the model's weights.

Rounded to bfloat16, logits of a size of 20 are multiples of 0.125: the largest two of a row are
often equal then, and a greedy choice takes the wrong one.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aioserve.features.lora.cpu_products import CompiledProduct
from aioserve.features.lora.products import Piece, TorchProduct
from aioserve.kernels import Kernels, load_kernels, usable_variants
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu.models import load_model_on_cpu
from aioserve.runner.cpu.products import BlockLinear, PanelLinear
from aioserve.runner.fused.model import FusedModel
from aioserve.runner.fused.ops import WideLinear
from aioserve.runner.served_model import ServedModel
from tests.blocks import random_weight
from tests.models import make_model
from tests.runner.driver import make_config

NUM_ROWS = (1, 3, 7, 40, 200)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def load(path: Path, **model: object) -> ServedModel:
    config = make_config(path, **model).model
    return load_model_on_cpu(config, ModelInfo(config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", [*usable_variants(), "torch"])
def test_a_wide_product_is_as_exact_as_float32(variant: str, dtype: torch.dtype) -> None:
    weight, bias, x = (draw(*shape).to(dtype) for shape in ((150, 592), (150,), (200, 592)))
    if variant == "torch":
        linear: PanelLinear | WideLinear = WideLinear(weight, bias)
    else:
        linear = PanelLinear.of(Kernels(variant), weight, bias, torch.float32)
    expected = x.double() @ weight.double().T + bias.double()
    sizes = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    for rows in NUM_ROWS:
        found = linear(x[:rows])
        assert found.dtype is torch.float32
        assert bool(((found.double() - expected[:rows]).abs() <= 4e-6 * sizes[:rows]).all())


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("variant", usable_variants())
def test_a_wide_product_of_quantized_weights_rounds_to_the_narrow_one(
    variant: str, kind: str
) -> None:
    kernels, weight = Kernels(variant), random_weight(kind, 150, 512)
    x, bias = draw(200, 512).bfloat16(), draw(150).bfloat16()
    narrow = BlockLinear.of(kernels, [weight], bias, x.dtype)
    wide = BlockLinear.of(kernels, [weight], bias, x.dtype, torch.float32)
    for rows in NUM_ROWS:
        found = wide(x[:rows])
        assert found.dtype is torch.float32
        assert torch.equal(found.to(x.dtype), narrow(x[:rows]))


@pytest.mark.parametrize("variant", usable_variants())
def test_an_adapter_adds_to_wide_outputs_without_rounding(variant: str) -> None:
    kernels, x = Kernels(variant), draw(40, 64).bfloat16()
    piece = Piece(3, draw(8, 64).bfloat16(), draw(140, 8).bfloat16())
    rows = torch.arange(0, 40, 2)
    expected = torch.zeros(40, 150)
    TorchProduct([piece]).add(x, expected, rows)
    found = torch.zeros(40, 150)
    CompiledProduct(kernels, [piece]).add(x, found, rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kernels", ["", "off"], ids=["compiled", "torch"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # qwen3: its head is tied to its embedding
@torch.inference_mode()
def test_logits_are_the_sums_of_the_head(
    kind: str, fused: bool, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOSERVE_KERNELS", kernels)
    load_kernels.cache_clear()
    path = make_model(kind, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).bfloat16()
    try:
        model = load(path, dtype="bfloat16", fused=fused)
    finally:
        load_kernels.cache_clear()
    assert isinstance(model, FusedModel) == fused
    assert model.halves is not None
    hidden = draw(7, head.shape[1]).bfloat16()
    found = model.halves.logits(hidden)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, hidden.float() @ head.float().T, rtol=1e-5, atol=1e-5)
    assert model.halves.logits(hidden[:0]).shape == (0, len(head))  # no request samples
