"""Products with weights in blocks, of every variant that this CPU runs, against float64.

Rows of two-byte types become whole numbers on their way or stay as they are, and weights may become
bfloat16: the reference does the same. What is left are sums in float32, and one rounding of the
result.
What a format's bytes mean is `tests/model_source/test_quantized.py`.
"""

from collections.abc import Callable
from ctypes import c_int64
from threading import Thread

import pytest
import torch
from torch import Tensor

from aioserve.features.quantized import FORMATS
from aioserve.kernels import Kernels, load_kernels, usable_variants
from aioserve.kernels.library import open_library
from aioserve.model_source.quantized_weight import Codes, QuantizedWeight
from aioserve.runner.cpu.products import BlockEmbedding, BlockLinear, PanelLinear
from tests.blocks import random_weight

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

# Sums in float32, and one rounding of the result; as in test_products.py.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ROWS = [*range(8), 13, 14, 15, 16, 17, 37, 200]


def random_rows(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)


def int8_linear(
    kernels: Kernels,
    weights: list[QuantizedWeight],
    bias: Tensor | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> BlockLinear:
    """A product whose rows are quantized to int8."""
    linear = BlockLinear.of(kernels, weights, bias, dtype, out_dtype)
    linear.quantize_rows()
    return linear


#: Products with rows as they are, and with rows of int8.
BOTH_WAYS = pytest.mark.parametrize(
    "make", [BlockLinear.of, int8_linear], ids=["as they are", "int8"]
)


def whole_rows(x: Tensor) -> Tensor:
    """[rows, in] in float64, as 16 bits with a power of two that 32 inputs share."""
    groups = x.double().view(x.shape[0], -1, 32)
    _, exponent = groups.abs().amax(-1, keepdim=True).frexp()  # the largest is below 2^exponent
    step = torch.exp2(exponent.double() - 15)
    return ((groups / step).round() * step).view(x.shape)


def is_rounded(kernels: Kernels, rows: int, dtype: torch.dtype) -> bool:
    """Whether weights are, to bfloat16."""
    return dtype == torch.bfloat16 and rows >= kernels.rounded_from


def is_kept(kernels: Kernels, rows: int, dtype: torch.dtype) -> bool:
    """Whether the rows are multiplied as they are."""
    kept_from = c_int64.in_dll(open_library(kernels.variant), "kept_from").value
    return dtype == torch.bfloat16 and rows >= kept_from


@pytest.mark.parametrize("kind", [*FORMATS, "int4/128", "uint4/64", "uint8/512"])
def test_products_are_those_of_the_unpacked_weight(
    kernels: Kernels, dtype: torch.dtype, kind: str
) -> None:
    weight, x = random_weight(kind, 150, 512), random_rows(200, 512, dtype)
    x[:, 64:96] *= 2**-9  # inputs are whole in their own scale
    bias = random_rows(1, 150, dtype)[0]
    linear = BlockLinear.of(kernels, [weight], bias, dtype)
    unpacked = weight.dequantize(torch.float32)
    size = x.double().abs() @ unpacked.double().abs().T + bias.double().abs()
    plain, whole = PanelLinear.of(kernels, unpacked.to(dtype), bias), whole_rows(x)
    for rows in ROWS:
        found = linear(x[:rows])
        if dtype == torch.float32 or is_rounded(kernels, rows, dtype):
            assert torch.equal(found, plain(x[:rows])), rows
            continue
        own = x if is_kept(kernels, rows, dtype) else whole
        expected = own[:rows].double() @ unpacked.double().T + bias.double()
        limit = TOLERANCE[dtype] * expected.abs() + 4e-6 * size[:rows]
        assert bool(((found.double() - expected).abs() <= limit).all()), rows


def test_a_row_in_whole_numbers_lost_little_beside_its_own_rounding() -> None:
    """A thousandth of what bfloat16 lost of it, in squares: next to nothing is added."""
    exact = torch.randn(100, 512, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = exact.to(torch.bfloat16).double()
    lost = (whole_rows(x) - x).square().sum()
    assert float(lost / (x - exact).square().sum()) < 1 / 1000


@BOTH_WAYS
def test_what_is_not_a_number_stays_in_its_row_and_output(
    kernels: Kernels, dtype: torch.dtype, make: Callable[..., BlockLinear]
) -> None:
    weight, x = random_weight("Q8_0", 40, 64), random_rows(40, 64, dtype)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    scale = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    weight.data[2, :2] = scale
    found = make(kernels, [weight], None, dtype)(x)
    assert not bool(found[1:3].isfinite().any())
    assert not bool(found[:, 2].isfinite().any())
    rest = torch.ones(40, 40, dtype=torch.bool)
    rest[1:3], rest[:, 2] = False, False
    assert bool(found[rest].isfinite().all())


@BOTH_WAYS
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_a_row_gets_the_same_bits_beside_any_others_and_with_any_number_of_threads(
    kernels: Kernels, dtype: torch.dtype, kind: str, make: Callable[..., BlockLinear]
) -> None:
    inputs = 1024 if make is int8_linear else 512
    linear = make(kernels, [random_weight(kind, 450, inputs)], None, dtype)
    x = random_rows(200, inputs, dtype)
    threads, alone = torch.get_num_threads(), torch.cat([linear(row[None]) for row in x])
    many = linear(x)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for rows in ROWS:
                expected = many if is_rounded(kernels, rows, dtype) else alone
                assert torch.equal(linear(x[200 - rows :]), expected[200 - rows :]), rows
    finally:
        torch.set_num_threads(threads)


@BOTH_WAYS
def test_weights_of_several_formats_share_one_product(
    kernels: Kernels, dtype: torch.dtype, make: Callable[..., BlockLinear]
) -> None:
    sizes = (("Q4_K", 70, 256), ("Q8_0", 33, 256), ("Q6_K", 1, 256), ("uint4/128", 20, 256))
    weights = [random_weight(*of) for of in sizes]
    bias, x = random_rows(1, 124, dtype)[0], random_rows(40, 256, dtype)
    both = make(kernels, weights, bias, dtype)
    parts = zip(weights, bias.split([70, 33, 1, 20]), strict=True)
    alone = [make(kernels, [weight], part, dtype) for weight, part in parts]
    for rows in (1, 3, 5, 40):
        room = torch.full((rows + 1, 124), 7.0, dtype=dtype)
        kernels.linear(both.packed, x[:rows], room)
        assert torch.equal(room[:rows], torch.cat([linear(x[:rows]) for linear in alone], dim=1))
        assert bool((room[rows] == 7).all())


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K"])
def test_rows_are_those_of_the_unpacked_weight(
    kernels: Kernels, dtype: torch.dtype, kind: str
) -> None:
    weights = [random_weight(kind, 130, 256), random_weight("Q5_K", 9, 256)]
    ids = torch.tensor([129, 0, 64, 63, 130, 138, 0])
    unpacked = torch.cat([weight.dequantize(dtype) for weight in weights])
    table = BlockEmbedding(BlockLinear.of(kernels, weights, None, dtype), dtype)
    assert torch.equal(table(ids), unpacked[ids])
    assert table(ids[:0]).shape == (0, 256)
    for stranger in (139, -1, 1 << 40):
        with pytest.raises(IndexError, match=f"token {stranger} is outside the vocabulary of 139"):
            table(torch.tensor([0, stranger]))


def test_other_threads_keep_their_number_of_threads_while_weights_are_laid_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode, seen = QuantizedWeight.codes, []

    def look_and_decode(weight: QuantizedWeight) -> Codes:
        other = Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        return decode(weight)

    threads = torch.get_num_threads()
    monkeypatch.setattr(QuantizedWeight, "codes", look_and_decode)
    try:
        torch.set_num_threads(3)
        BlockLinear.of(load_kernels(), [random_weight("Q8_0", 40, 64)], None, torch.float32)
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {3}


def test_many_rows_have_the_bits_of_fewer(kernels: Kernels) -> None:
    """On AMX many take panels of unpacked weights in groups, and inputs in blocks."""
    linear = BlockLinear.of(kernels, [random_weight("Q4_1", 450, 1024)], None, torch.bfloat16)
    x = random_rows(530, 1024, torch.bfloat16)
    assert torch.equal(linear(x)[:200], linear(x[:200]))
