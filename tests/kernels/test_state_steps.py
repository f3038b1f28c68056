"""Layers with states, by every variant that this CPU runs, against torch in float64.

Tokens are gone through one by one. Tolerances are those of float32 sums in another order than
torch's, over up to 128 numbers, and of outputs rounded to their type.
"""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels import KernelsUnavailableError, usable_variants
from aioserve.kernels.state_steps import StateSteps
from tests.slow import mostly_slow

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

Draw = Callable[..., Tensor]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ROUNDED = {  # of outputs of one type
    torch.float32: CLOSE,
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5},
    torch.float16: {"rtol": 2**-11, "atol": 1e-5},
}


@pytest.fixture(scope="module")
def variants() -> list[StateSteps]:
    """All that have these kernels: what is expected of them is computed once."""
    found = []
    for name in usable_variants():
        with suppress(KernelsUnavailableError):
            found.append(StateSteps(name))
    assert found
    return found


@pytest.fixture
def randn() -> Draw:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def rows_of_more(states: Tensor) -> Tensor:
    """The same states as every row but the first and last of a larger tensor."""
    whole = torch.full((len(states) + 2, *states.shape[1:]), 7.0, dtype=states.dtype)
    whole[1:-1] = states
    return whole[1:-1]


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, **CLOSE)


def apart(x: Tensor) -> Tensor:
    """The same numbers, with others between and around those of tokens."""
    whole = torch.full((*x.shape[:2], x[0, 0].numel() + 16), 7.0, dtype=x.dtype)
    whole[..., 8:-8] = x.flatten(2)
    return whole[..., 8:-8].view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", mostly_slow([1, 3, 32, 71], but=[1, 71]))
@pytest.mark.parametrize(
    ("rows", "key_heads", "value_heads", "key_dim", "value_dim"),
    [(1, 1, 1, 16, 16), (3, 2, 6, 24, 80), (2, 4, 8, 128, 128)],
)
def test_tokens_of_the_gated_delta_rule(
    variants: list[StateSteps],
    randn: Draw,
    rows: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    tokens: int,
    dtype: torch.dtype,
) -> None:
    states = randn(rows, value_heads, key_dim, value_dim)
    query, key = (apart(randn(rows, tokens, key_heads, key_dim).to(dtype)) for _ in range(2))
    value = apart(randn(rows, tokens, value_heads, value_dim).to(dtype))
    beta = randn(rows, tokens, value_heads).sigmoid()
    decay = torch.exp(-randn(rows, tokens, value_heads).abs() / 4)
    now, expected = states.double(), torch.empty(value.shape, dtype=torch.float64)
    each = value_heads // key_heads
    wide_query, wide_key = (
        F.normalize(x.double(), dim=-1).repeat_interleave(each, 2) for x in (query, key)
    )
    for token in range(tokens):
        now = now * decay[:, token, :, None, None]
        known = (now * wide_key[:, token, :, :, None]).sum(-2)
        change = (value[:, token] - known) * beta[:, token, :, None]
        now = now + wide_key[:, token, :, :, None] * change[:, :, None]
        expected[:, token] = (now * wide_query[:, token, :, :, None]).sum(-2) * key_dim**-0.5
    for steps in variants:
        own, out = rows_of_more(states), torch.empty(value.shape, dtype=dtype)
        steps.gated_delta(
            own, query, key, value, decay, beta, out, is_normalized=True, scale=key_dim**-0.5
        )
        torch.testing.assert_close(out.double(), expected, **ROUNDED[dtype])
        assert_same(own, now)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", mostly_slow([1, 3, 32, 71], but=[1, 71]))
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "groups", "size"),
    [(1, 1, 1, 1, 16), (3, 6, 23, 2, 48), (2, 8, 64, 1, 128)],
)
def test_tokens_of_mamba_2(
    variants: list[StateSteps],
    randn: Draw,
    rows: int,
    heads: int,
    head_dim: int,
    groups: int,
    size: int,
    tokens: int,
    dtype: torch.dtype,
) -> None:
    states = randn(rows, heads, head_dim, size)
    x = apart(randn(rows, tokens, heads, head_dim).to(dtype))
    b, c = (apart(randn(rows, tokens, groups, size).to(dtype)) for _ in range(2))
    step, d = randn(rows, tokens, heads).abs(), randn(heads)
    decay = torch.exp(-step)
    now, expected = states.double(), torch.empty(x.shape, dtype=torch.float64)
    wide_b, wide_c = (t.double().repeat_interleave(heads // groups, 2) for t in (b, c))
    for token in range(tokens):
        into = (x[:, token] * step[:, token, :, None]).double()
        now = now * decay[:, token, :, None, None] + into[..., None] * wide_b[:, token, :, None]
        expected[:, token] = (now * wide_c[:, token, :, None]).sum(-1) + d[:, None] * x[:, token]
    for steps in variants:
        own, out = rows_of_more(states), torch.empty(x.shape, dtype=dtype)
        steps.state_space(own, x, decay, step, b, c, d, out)
        torch.testing.assert_close(out.double(), expected, **ROUNDED[dtype] | {"atol": 1e-4})
        assert_same(own, now)


@pytest.mark.parametrize(
    ("rows", "tokens", "channels", "size"), [(1, 1, 1, 16), (2, 5, 70, 16), (1, 64, 256, 32)]
)
def test_tokens_of_mamba_1_one_behind_the_other(
    variants: list[StateSteps], randn: Draw, rows: int, tokens: int, channels: int, size: int
) -> None:
    states = randn(rows, channels, size)
    x, step = randn(rows, tokens, channels), randn(rows, tokens, channels).abs()
    a, d = -randn(channels, size).abs(), randn(channels)
    b, c = randn(rows, tokens, size), randn(rows, tokens, size)
    now, expected = states.double(), torch.empty(x.shape, dtype=torch.float64)
    for token in range(tokens):
        dt, into = step[:, token, :, None], x[:, token, :, None]
        now = torch.exp(dt.double() * a) * now + dt.double() * into * b[:, token, None]
        expected[:, token] = (now * c[:, token, None]).sum(-1) + d * x[:, token]
    for steps in variants:
        own, out = rows_of_more(states), torch.empty_like(x)
        steps.scan(own, x, step, a, b, c, d, out)
        assert_same(out, expected)
        assert_same(own, now)


@pytest.mark.parametrize("tokens", [1, 37])
def test_a_row_does_not_depend_on_the_others(
    variants: list[StateSteps], randn: Draw, tokens: int
) -> None:
    states, x = randn(9, 8, 32, 64), randn(9, tokens, 8, 32)
    step, b, d = randn(9, tokens, 8).abs(), randn(9, tokens, 1, 64), randn(8)
    for steps in variants:
        together, alone, out = states.clone(), states.clone(), torch.empty_like(x)
        steps.state_space(together, x, torch.exp(-step), step, b, b, d, out)
        for row in range(9):
            own, last = alone[row : row + 1], torch.empty_like(x[:1])
            args = [t[row : row + 1].contiguous() for t in (x, torch.exp(-step), step, b, b)]
            steps.state_space(own, *args, d, last)
            assert torch.equal(last, out[row : row + 1])
        assert torch.equal(alone, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "tokens", "channels", "taps"), [(1, 1, 16, 4), (3, 9, 80, 3)])
def test_causal_convolutions(
    variants: list[StateSteps],
    randn: Draw,
    rows: int,
    tokens: int,
    channels: int,
    taps: int,
    dtype: torch.dtype,
) -> None:
    x, weight = apart(randn(rows, tokens, channels).to(dtype)), randn(taps, channels)
    bias, out = randn(channels), torch.empty(x.shape, dtype=dtype)
    padded = F.pad(x.double(), (0, 0, taps - 1, 0))
    sums = sum(padded[:, j : j + tokens] * weight[j] for j in range(taps)) + 0.0
    for has_silu, own, expected in ((True, bias, F.silu(sums + bias)), (False, None, sums)):
        for steps in variants:
            steps.conv(x, weight, own, has_silu, out)
            torch.testing.assert_close(out.double(), expected.double(), **ROUNDED[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "channels", "taps", "width"), [(1, 16, 4, 4), (3, 80, 4, 3), (9, 2048, 3, 5)]
)
def test_a_token_of_a_convolution_behind_its_last_inputs(
    variants: list[StateSteps],
    randn: Draw,
    rows: int,
    channels: int,
    taps: int,
    width: int,
    dtype: torch.dtype,
) -> None:
    states = randn(rows, channels, width).to(dtype)
    x, weight = apart(randn(rows, 1, channels).to(dtype))[:, 0], randn(channels, taps).to(dtype)
    bias, out = randn(channels).to(dtype), torch.empty(x.shape, dtype=dtype)
    inputs = torch.cat([states, x[..., None]], -1)
    sums = (inputs[..., -taps:].double() * weight).sum(-1)
    for has_silu, own, expected in ((True, bias, F.silu(sums + bias)), (False, None, sums)):
        for steps in variants:
            now = rows_of_more(states)
            steps.conv_step(now, x, weight, own, has_silu, out)
            torch.testing.assert_close(out.double(), expected, **ROUNDED[dtype])
            assert torch.equal(now, inputs[..., 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_gated_first", [True, False])
@pytest.mark.parametrize(("rows", "groups", "size"), [(1, 1, 16), (5, 3, 80), (70, 1, 1024)])
def test_gated_norms(
    variants: list[StateSteps],
    randn: Draw,
    rows: int,
    groups: int,
    size: int,
    is_gated_first: bool,
    dtype: torch.dtype,
) -> None:
    x, weight = randn(rows, groups * size).to(dtype), randn(groups * size)
    gate, out = apart(randn(rows, 1, groups * size).to(dtype))[:, 0], torch.empty_like(x)
    opened = F.silu(gate.double())
    whole = (x * opened if is_gated_first else x.double()).unflatten(1, (groups, size))
    normed = whole * torch.rsqrt((whole**2).mean(-1, keepdim=True) + 1e-5)
    expected = normed.flatten(1) * weight * (1 if is_gated_first else opened)
    for steps in variants:
        steps.gated_norm(x, gate, weight, 1e-5, size, is_gated_first, out)
        torch.testing.assert_close(out.double(), expected, **ROUNDED[dtype])
