"""Products of every variant that this CPU runs, against torch in float64.

A sum of n products in float32 is off by at most n units in the last place of the sum of their
absolute values, and by far less in practice; the result is rounded once to its type.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels import Kernels, usable_variants
from aioserve.runner.cpu.products import BlockLinear, PanelLinear
from tests.blocks import random_weight

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

# Relative to the sum of the absolute values of the products: sums in float32, and one rounding.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Around every number at which other code takes over, and more than is taken at a time.
ROWS = [*range(21), 32, 33, 36, 37, 192, 200]


Draw = Callable[..., Tensor]


@pytest.fixture
def draw(dtype: torch.dtype) -> Draw:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_any_size_are_close_to_float64(
    kernels: Kernels, dtype: torch.dtype, draw: Draw, has_bias: bool
) -> None:
    for outputs, inputs in [(1, 16), (33, 48), (130, 592), (40, 1040), (960, 32)]:
        weight, bias = draw(outputs, inputs), draw(outputs) if has_bias else None
        linear, x = PanelLinear.of(kernels, weight, bias), draw(200, inputs)
        expected = x.double() @ weight.double().T
        size = x.double().abs() @ weight.double().abs().T
        if bias is not None:
            expected, size = expected + bias.double(), size + bias.double().abs()
        limit = (
            TOLERANCE[dtype] * (expected.abs() if dtype != torch.float32 else size) + 4e-6 * size
        )
        for rows in ROWS:
            found = linear(x[:rows])
            assert bool(((found.double() - expected[:rows]).abs() <= limit[:rows]).all()), rows


def test_a_row_gets_the_same_bits_beside_any_others_and_with_any_number_of_threads(
    kernels: Kernels, draw: Draw
) -> None:
    threads = torch.get_num_threads()
    # by AMX the second is a block of inputs at a time, the third blocks of rows: more for 2 threads
    for outputs, inputs, most in [(450, 592, 530), (70, 1040, 530), (33, 16384, 65)]:
        linear = PanelLinear.of(kernels, draw(outputs, inputs), draw(outputs))
        x = draw(most, inputs)
        expected = torch.cat([linear(row[None]) for row in x])
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                for rows in (*(rows for rows in ROWS if rows < most), most):
                    assert torch.equal(linear(x[most - rows :]), expected[most - rows :]), rows
        finally:
            torch.set_num_threads(threads)


def test_nothing_is_written_beside_the_outputs(kernels: Kernels, draw: Draw) -> None:
    linear, x = PanelLinear.of(kernels, draw(33, 16), None), draw(50, 16)
    for rows in (1, 3, 7, 50):
        room = torch.full((rows + 1, 33), 7.0, dtype=x.dtype)
        kernels.linear(linear.packed, x[:rows], room)
        assert bool((room[rows] == 7).all())
        assert torch.equal(room[:rows], linear(x[:rows]))


def test_what_is_not_a_number_stays_in_its_row_and_output(kernels: Kernels, draw: Draw) -> None:
    weight, x = draw(40, 32), draw(40, 32)
    x[1, 3], weight[2, 5] = float("nan"), float("inf")
    found = PanelLinear.of(kernels, weight, None)(x)
    assert bool(found[1].isnan().all())
    assert not bool(found[:, 2].isfinite().any())
    rest = torch.ones(40, 40, dtype=torch.bool)
    rest[1], rest[:, 2] = False, False
    assert bool(found[rest].isfinite().all())


def noted_maxima(kernels: Kernels, linear: PanelLinear | BlockLinear, x: Tensor) -> Tensor:
    """Multiply, and check what is noted of the outputs, which are returned."""
    outputs, noted, rows = linear.packed.outputs, kernels.noted, len(x)
    maxima = torch.full((-(-outputs // noted) + 1, rows), 7.0)
    linear.packed.maxima = maxima.data_ptr()
    found = linear(x)
    whole = F.pad(found, (0, -outputs % noted), value=-torch.inf)
    expected = whole.view(rows, -1, noted).amax(-1).T  # NaN where there is any
    torch.testing.assert_close(maxima[:-1], expected, rtol=0, atol=0, equal_nan=True)
    assert bool((maxima[-1] == 7).all())
    linear.packed.maxima = None
    torch.testing.assert_close(linear(x), found, rtol=0, atol=0, equal_nan=True)
    return found


def test_the_largest_outputs_are_noted(kernels: Kernels, dtype: torch.dtype, draw: Draw) -> None:
    for outputs, inputs in [(1, 16), (33, 48), (450, 592), (70, 1040), (961, 32)]:
        weight, x = draw(outputs, inputs), draw(530, inputs)
        weight[outputs // 2, 0] = -torch.inf  # with both signs below
        weight[outputs // 3, 1] = torch.nan if inputs == 32 else 3
        x[::3, 0], x[5] = 0, torch.inf
        x[17, 3] = torch.nan
        linear = PanelLinear.of(kernels, weight, None, torch.float32)
        for rows in (*ROWS[1:], 530):
            noted_maxima(kernels, linear, x[530 - rows :])


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("is_int8", [False, True])
def test_the_largest_outputs_of_quantized_weights_are_noted(
    kernels: Kernels, dtype: torch.dtype, draw: Draw, kind: str, is_int8: bool
) -> None:
    weight, x = random_weight(kind, 450, 512), draw(200, 512)
    linear = BlockLinear.of(kernels, [weight], None, dtype, torch.float32)
    if is_int8:
        linear.quantize_rows()
    for rows in (1, 2, 13, 17, 36, 200):
        assert bool(noted_maxima(kernels, linear, x[:rows]).isfinite().all())
