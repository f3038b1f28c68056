"""Every variant that this CPU runs, against torch in float64.

Tolerances: float32 sums in another order than torch differ by a few units in the last place, 1e-6
relative; bfloat16 results are rounded once, to 8 bits, by at most 2^-8, float16 ones to 11 bits.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels import Kernels, usable_variants

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

EPS = 1e-5
TOLERANCE = {
    torch.float32: {"rtol": 5e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-6},
}


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], weight.double(), EPS)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), **TOLERANCE[actual.dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_two_bytes_are_widened_and_rounded_as_torch_does(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    """Every number added to some other, those too small for their own exponent included."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)[None]
    others = numbers[:, torch.randperm(1 << 16, generator=generator)]
    near = torch.rand(others.shape, generator=generator) < 0.5
    others = torch.where(near, numbers * -0.7, others)
    total, expected = others.clone(), (numbers.float() + others.float()).to(dtype)
    kernels.add_rms_norm(numbers, total, torch.ones_like(numbers[0]), EPS, torch.empty_like(total))
    same = (total == expected) | (total.isnan() & expected.isnan())
    # the instruction that rounds to bfloat16 makes 0 of what float32 has no exponent for
    same |= (expected.abs() < torch.finfo(torch.float32).tiny) & (expected != 0)
    assert bool(same.all())


SHAPES = [(1, 16), (3, 48), (7, 576), (100, 1024)]  # the last is enough work for all threads


def test_rms_norm_equals_torch(
    kernels: Kernels, dtype: torch.dtype, randn: Callable[..., Tensor]
) -> None:
    for shape in SHAPES:
        x, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
        out = torch.empty_like(x)
        kernels.rms_norm(x, weight, EPS, out)
        assert_close(out, norm(x, weight))


def test_add_rms_norm_updates_the_residual_and_normalizes_it(
    kernels: Kernels, dtype: torch.dtype, randn: Callable[..., Tensor]
) -> None:
    for shape in SHAPES:
        x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
        weight, total = randn(shape[1], dtype=dtype), x + residual
        kernels.add_rms_norm(x, residual, weight, EPS, x)
        assert torch.equal(residual, total)
        assert_close(x, norm(total, weight))


def test_gated_activations_equal_torch(
    kernels: Kernels, dtype: torch.dtype, randn: Callable[..., Tensor]
) -> None:
    for shape in SHAPES:
        tokens, n = shape
        x = randn(tokens, 2 * n, dtype=dtype) * 5
        out = x.new_empty(tokens, n)
        gate, factor = x.double().chunk(2, dim=1)
        kernels.silu_and_mul(x, out)
        assert_close(out, F.silu(gate) * factor)
        kernels.gelu_tanh_and_mul(x, out)
        expected = F.gelu(gate, approximate="tanh") * factor
        # far below zero 1 + tanh cancels; torch's own float32 is no closer
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype]["rtol"], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_activations_of_huge_and_missing_numbers(kernels: Kernels, dtype: torch.dtype) -> None:
    gate = torch.tensor([1e30, -1e30, 200.0, -200.0, float("nan"), 0.0] + [1.0] * 10, dtype=dtype)
    out = torch.empty(1, 16, dtype=dtype)
    kernels.silu_and_mul(torch.cat([gate, torch.ones(16, dtype=dtype)])[None], out)
    rtol = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out[0], F.silu(gate), equal_nan=True, atol=1e-5, rtol=rtol)


def rotated(x: Tensor, cos_sin: Tensor, weight: Tensor | None) -> Tensor:
    """`x` [T, H, D], one row of `cos_sin` per token."""
    x = x.double() if weight is None else norm(x, weight)
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos_sin.double()[:, None].chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "key_dim", "value_dim", "block_size"),
    [(1, 9, 3, 64, 64, 16), (5, 4, 4, 48, 80, 3), (130, 6, 1, 16, 16, 7), (2, 2, 1, 256, 64, 16)],
)
def test_rope_store_rotates_in_place_and_fills_the_cache(
    kernels: Kernels,
    dtype: torch.dtype,
    randn: Callable[..., Tensor],
    tokens: int,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    has_norms: bool,
) -> None:
    widths = [heads * key_dim, kv_heads * key_dim, kv_heads * value_dim]
    qkv = randn(tokens, sum(widths), dtype=dtype)
    qkv[0, -1] = float("nan")
    angles = randn(300, key_dim // 2, dtype=torch.float32) * 3
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:tokens]
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    key_cache = torch.zeros(num_blocks, kv_heads, block_size, key_dim, dtype=dtype)
    value_cache = torch.zeros(num_blocks, kv_heads, block_size, value_dim, dtype=dtype)
    q_norm, k_norm = (randn(key_dim, dtype=dtype) if has_norms else None for _ in range(2))
    q, k, v = (
        part.unflatten(1, (-1, dim)).clone()
        for part, dim in zip(qkv.split(widths, 1), (key_dim, key_dim, value_dim), strict=True)
    )
    kernels.rope_store(
        *(qkv, cos_sin, positions, slots, key_cache, value_cache, heads, q_norm, k_norm, EPS)
    )
    stored_k = key_cache.transpose(1, 2).flatten(0, 1)[slots]
    stored_v = value_cache.transpose(1, 2).flatten(0, 1)[slots]
    # a difference of products
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for actual, expected in [
        (qkv[:, : widths[0]].unflatten(1, (heads, -1)), rotated(q, cos_sin[positions], q_norm)),
        (stored_k, rotated(k, cos_sin[positions], k_norm)),
    ]:
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(stored_v, v.nan_to_num(nan=0.0))
    assert int(key_cache.count_nonzero()) <= stored_k.numel()  # no other slot was touched


def test_store_kv_takes_any_layout_and_no_infinity(
    kernels: Kernels, dtype: torch.dtype, randn: Callable[..., Tensor]
) -> None:
    x = randn(3, 11, 32, dtype=dtype)  # heads first
    x[0, 0, 0], x[1, 1, 1], x[2, 2, 2] = float("inf"), float("-inf"), float("nan")
    cache = torch.zeros(5, 3, 4, 32, dtype=dtype)
    slots = torch.randperm(20)[:11]
    kernels.store_kv(x.transpose(0, 1), slots, cache)
    stored = cache.transpose(1, 2).flatten(0, 1)[slots].transpose(0, 1)
    assert torch.equal(stored, x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


def test_the_number_of_threads_does_not_change_a_bit(
    kernels: Kernels, dtype: torch.dtype, randn: Callable[..., Tensor]
) -> None:
    x, weight = randn(200, 512, dtype=dtype), randn(512, dtype=dtype)
    threads, outs = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        outs.append(torch.empty_like(x))
        kernels.rms_norm(x, weight, EPS, outs[-1])
    torch.set_num_threads(threads)
    assert torch.equal(*outs)
