"""What the bytes of a format mean, against the package gguf."""

import gguf
import numpy as np
import pytest
import torch

from aioserve.features.quantized import FORMATS, quantize
from aioserve.model_source.quantized_weight import QuantizedWeight
from tests.blocks import random_weight


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_is_unpacked_to_the_bit(kind: str) -> None:
    weight = random_weight(kind, 40, 768)
    expected = gguf.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[kind])
    assert weight.shape == expected.shape
    assert torch.equal(weight.dequantize(torch.float32), torch.from_numpy(expected))
    some = weight.rows(torch.tensor([39, 2])).dequantize(torch.float32)
    assert torch.equal(some, torch.from_numpy(expected[[39, 2]]))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_group_of_any_size_has_one_scale(group: int) -> None:
    weight = torch.randn(20, 384, generator=torch.Generator().manual_seed(0))
    for bits, largest in ((8, 127), (4, 8)):
        found = quantize(weight, f"int{bits}/{group}").dequantize(torch.float32)
        for one, other in zip(
            found.view(-1, group).split(7), weight.view(-1, group).split(7), strict=True
        ):
            step = (other.abs().amax(1, keepdim=True) / largest).half().float()
            assert torch.equal((one / step).round() * step, one)
            assert bool(((one - other).abs() <= step * (0.51 if bits == 8 else 1.01)).all())


@pytest.mark.parametrize(("kind", "most"), [("Q8_0", 1 / 254), ("Q4_0", 1 / 14)])
def test_a_weight_is_off_by_at_most_half_a_step(kind: str, most: float) -> None:
    """But for the number opposite to the largest, of which 4 bits have one less."""
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    found = quantize(weight, kind)
    assert isinstance(found, QuantizedWeight)
    error = (found.dequantize(torch.float32) - weight).unflatten(1, (-1, 32)).abs()
    largest = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert bool((error <= most * (1 + 1 / (kind == "Q4_0" or 2**30)) * 1.001 * largest).all())
    ours = error.square().mean()
    theirs = gguf.dequantize(
        gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind]),
        gguf.GGMLQuantizationType[kind],
    )
    assert ours <= 1.02 * float(np.square(theirs - weight.numpy()).mean())
