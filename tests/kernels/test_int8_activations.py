"""Products of rows quantized to int8, of every variant that this CPU runs, against float64."""

import pytest
import torch

from aioserve.features.quantized import FORMATS, quantize, quantized_weight
from aioserve.kernels import Kernels, usable_variants
from aioserve.runner.cpu.products import BlockLinear
from tests.blocks import random_weight
from tests.int8_activations import int8_rows, quantized_rows
from tests.kernels.test_blocks import TOLERANCE, int8_linear, is_rounded, random_rows

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

ROWS = [*range(8), 16, 37, 200]
KINDS = [*FORMATS, "int8/64", "int4/128", "uint4/64", "uint8/512"]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_unpacked_weight_with_rows_of_int8(
    kernels: Kernels, dtype: torch.dtype, kind: str
) -> None:
    weight, x = random_weight(kind, 150, 1024), random_rows(200, 1024, dtype)
    x[:, 64:96] *= 2**-9  # in a scale of their own
    x[5, :32] = 0
    bias = random_rows(1, 150, dtype)[0]
    linear = int8_linear(kernels, [weight], bias, dtype)
    rows_, unpacked = int8_rows(x), weight.dequantize(torch.float32).double()
    for rows in ROWS:
        if is_rounded(kernels, rows, dtype):  # see the next test
            continue
        expected = rows_[:rows] @ unpacked.T + bias.double()
        size = rows_[:rows].abs() @ unpacked.abs().T + bias.double().abs()
        limit = TOLERANCE[dtype] * expected.abs() + 4e-6 * size
        assert bool(((linear(x[:rows]).double() - expected).abs() <= limit).all()), rows


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_many_rows_are_multiplied_as_they_are_where_that_is_faster(
    kernels: Kernels, dtype: torch.dtype, kind: str
) -> None:
    """With AMX, in bfloat16, where weights in blocks become bfloat16; nowhere else."""
    weight, x = random_weight(kind, 150, 512), random_rows(200, 512, dtype)
    rounding = int8_linear(kernels, [weight], None, dtype)
    exact = BlockLinear.of(kernels, [weight], None, dtype)
    has_amx = kernels.variant == "amx_bf16" and dtype == torch.bfloat16
    for rows in (1, 13, 14, 16, 37, 200):
        is_exact = torch.equal(rounding(x[:rows]), exact(x[:rows]))
        assert is_exact == (has_amx and rows >= 14), rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_saturate(kernels: Kernels, bits: int, sign: int) -> None:
    """Every code is the lowest or the highest that there is, and every byte 127 or -127."""
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2, (64, 512), generator=random) * ((1 << bits) - 1)
    codes[0], codes[1] = 0, (1 << bits) - 1  # all of one sign
    if bits == 8:
        data = (codes - 128).to(torch.int8).view(torch.uint8).view(64, 16, 32)
    else:
        low, high = codes.to(torch.uint8).view(64, 16, 32).chunk(2, dim=-1)
        data = low | high << 4
    ones = torch.ones(64, 16, 1, dtype=torch.float16).view(torch.uint8)
    weight = quantized_weight(
        "Q8_0" if bits == 8 else "Q4_0", torch.cat((ones, data), -1).flatten(1)
    )
    x = torch.full((10, 512), 127.0 * sign)
    x[1::2] *= torch.randint(0, 2, (5, 512), generator=random) * 2 - 1
    found = int8_linear(kernels, [weight], None, torch.float32)(x)
    assert torch.equal(found, x @ (codes - (1 << bits - 1)).float().T)  # below 2^24: exact


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype, kind: str) -> None:
    """Without fused multiply-adds, sums of blocks are rounded twice."""
    weight, x = random_weight(kind, 150, 512), random_rows(40, 512, dtype)
    found = {}
    for variant in usable_variants():
        kernels = Kernels(variant)
        at_once = 13 if is_rounded(kernels, 40, dtype) else 40
        linear = int8_linear(kernels, [weight], None, dtype, out_dtype=torch.float32)
        found[variant] = torch.cat([linear(rows).clone() for rows in x.split(at_once)])
    first = next(iter(found.values()))
    for variant, own in found.items():
        if Kernels(variant).is_fast:
            assert torch.equal(own, first), variant
        assert torch.allclose(own, first, rtol=1e-5, atol=1e-4), variant


def test_integers_of_every_instruction_set_are_the_same(kernels: Kernels) -> None:
    """Scales are powers of two here, so that no sum is rounded."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(20, 256, generator=random)
    x.view(20, 8, 32)[:, :, 0] = 127 / 16  # with the largest 127 / 16, a byte is worth 1 / 16
    x.clamp_(-127 / 16, 127 / 16)
    weight = torch.randint(-127, 128, (70, 256), generator=random).float()
    weight.view(70, 8, 32)[:, :, 5] = 127
    found = int8_linear(kernels, [quantize(weight, "Q8_0")], None, torch.float32)(x)
    bytes_, scales = quantized_rows(x)
    assert bool((scales == 1 / 16).all())
    assert torch.equal(found, bytes_.view(20, 256).double().matmul(weight.double().T).float() / 16)


def test_numbers_that_are_far_too_small_become_nothing(kernels: Kernels) -> None:
    """Of a block whose largest number is below 2^-100, whose inverse could be infinite."""
    weight, x = random_weight("Q8_0", 40, 64), random_rows(3, 64, torch.float32)
    x[1] *= 2.0**-110
    x[2] = 1e-45
    found = int8_linear(kernels, [weight], None, torch.float32)(x)
    assert bool(found[0].any())
    assert not bool(found[1:].any())
