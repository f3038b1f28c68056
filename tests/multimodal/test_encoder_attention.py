"""The attention of image encoders by the kernels is that of torch, and takes what torch takes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from aioserve.config import ModelConfig
from aioserve.features.multimodal.cpu_encoder_attention import NAME, attend, use_kernels
from aioserve.features.multimodal.vision_language import load_parts
from aioserve.kernels import Kernels, load_kernels, usable_variants
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.bridge import ATTN_IMPLEMENTATION
from aioserve.runner.cpu.models import CpuPlace
from tests.seeing_models import FEW_KINDS, SEEING_KINDS, make_seeing_model
from tests.slow import mostly_slow

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def states(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    # heads side by side, as linear layers leave them
    return tuple(
        torch.randn(shape[0], shape[2], shape[1], shape[3], generator=generator)
        .to(dtype)
        .transpose(1, 2)
        for _ in range(3)
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("shape", [(3, 4, 9, 8), (1, 2, 300, 72), (2, 1, 17, 64), (1, 3, 1, 80)])
def test_tokens_of_an_image_see_all_of_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    query, key, value = states(dtype, *shape)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), scale=0.2
    ).transpose(1, 2)
    for variant in usable_variants():
        found = attend(Kernels(variant), query, key, value, 0.2)
        torch.testing.assert_close(
            found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_masked_and_causal_attention_is_that_of_torch(is_causal: bool, is_masked: bool) -> None:
    query, key, value = states(torch.float32, 2, 4, 12, 16)
    mask = torch.rand(2, 1, 12, 12) > 0.3 if is_masked else None
    if mask is not None:
        mask[..., 0] = True
    module: Any = SimpleNamespace(is_causal=is_causal, training=False)
    both = [
        AttentionInterface()[name](module, query, key, value, mask, scaling=0.3)[0]
        for name in (NAME, "sdpa")
    ]
    torch.testing.assert_close(*both, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", mostly_slow(SEEING_KINDS, but=FEW_KINDS))
def test_the_encoder_of_every_family_attends_by_the_kernels(kind: str, tmp_path: Path) -> None:
    info = ModelInfo(ModelConfig(model=str(make_seeing_model(kind, tmp_path))))
    text, encoder = load_parts(info, torch.float32, None, CpuPlace())
    use_kernels(encoder)
    names = {
        module.config._attn_implementation
        for module in encoder._module.modules()
        if hasattr(module, "config") and not module.config.sub_configs
    }
    expected = NAME if load_kernels().is_fast else "sdpa"
    assert names - {ATTN_IMPLEMENTATION} == {expected}
    assert text.config._attn_implementation == ATTN_IMPLEMENTATION
