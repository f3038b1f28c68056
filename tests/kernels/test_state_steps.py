"""Steps of states, of every variant that this CPU runs, against torch in float64, token by token.

Tolerances are those of float32 sums in another order than torch's, over up to 128 numbers.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aioserve.kernels import KernelsUnavailableError, usable_variants
from aioserve.kernels.state_steps import StateSteps

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

Draw = Callable[..., Tensor]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", params=usable_variants())
def steps(request: pytest.FixtureRequest) -> StateSteps:
    try:
        return StateSteps(request.param)
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def randn() -> Draw:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def rows_of_more(states: Tensor) -> Tensor:
    """The same states as every row but the first and last of a larger tensor."""
    whole = torch.full((len(states) + 2, *states.shape[1:]), 7.0)
    whole[1:-1] = states
    return whole[1:-1]


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, **CLOSE)


@pytest.mark.parametrize(
    ("rows", "key_heads", "value_heads", "key_dim", "value_dim"),
    [(1, 1, 1, 16, 16), (3, 2, 6, 24, 80), (8, 4, 8, 128, 128)],
)
def test_a_token_of_the_gated_delta_rule(
    steps: StateSteps,
    randn: Draw,
    rows: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> None:
    states = rows_of_more(randn(rows, value_heads, key_dim, value_dim))
    query, key = (randn(rows, key_heads, key_dim) * key_dim**-0.5 for _ in range(2))
    value, beta = randn(rows, value_heads, value_dim), randn(rows, value_heads).sigmoid()
    decay = torch.exp(-randn(rows, value_heads).abs())
    before, out = states.double(), torch.empty_like(value)
    steps.gated_delta(states, query, key, value, decay, beta, out)

    each = value_heads // key_heads
    wide_query, wide_key = (x.double().repeat_interleave(each, 1) for x in (query, key))
    after = before * decay[..., None, None]
    known = (after * wide_key[..., None]).sum(-2)
    change = (value - known) * beta[..., None]
    after = after + wide_key[..., None] * change[:, :, None]
    assert_same(states, after)
    assert_same(out, (after * wide_query[..., None]).sum(-2))


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "groups", "size"),
    [(1, 1, 1, 1, 16), (3, 6, 24, 2, 48), (8, 32, 64, 1, 128)],
)
def test_a_token_of_mamba_2(
    steps: StateSteps, randn: Draw, rows: int, heads: int, head_dim: int, groups: int, size: int
) -> None:
    states = rows_of_more(randn(rows, heads, head_dim, size))
    x, step = randn(rows, heads, head_dim), randn(rows, heads).abs()
    b, c, d = randn(rows, groups, size), randn(rows, groups, size), randn(heads)
    decay = torch.exp(-step)
    before, out = states.double(), torch.empty_like(x)
    steps.state_space(states, x, decay, step, b, c, d, out)

    wide_b, wide_c = (t.double().repeat_interleave(heads // groups, 1)[:, :, None] for t in (b, c))
    after = before * decay[..., None, None] + (x * step[..., None])[..., None] * wide_b
    assert_same(states, after)
    torch.testing.assert_close(
        out.double(), (after * wide_c).sum(-1) + d[:, None] * x, rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(
    ("rows", "tokens", "channels", "size"), [(1, 1, 1, 16), (2, 5, 70, 16), (1, 64, 256, 32)]
)
def test_tokens_of_mamba_1_one_behind_the_other(
    steps: StateSteps, randn: Draw, rows: int, tokens: int, channels: int, size: int
) -> None:
    states = rows_of_more(randn(rows, channels, size))
    x, step = randn(rows, tokens, channels), randn(rows, tokens, channels).abs()
    a, d = -randn(channels, size).abs(), randn(channels)
    b, c = randn(rows, tokens, size), randn(rows, tokens, size)
    now, out = states.double(), torch.empty_like(x)
    steps.scan(states, x, step, a, b, c, d, out)

    for token in range(tokens):
        dt, into = step[:, token, :, None], x[:, token, :, None]
        now = torch.exp(dt.double() * a) * now + dt.double() * into * b[:, token, None]
        assert_same(out[:, token], (now * c[:, token, None]).sum(-1) + d * x[:, token])
    assert_same(states, now)


def test_a_row_does_not_depend_on_the_others(steps: StateSteps, randn: Draw) -> None:
    states, x = randn(9, 8, 32, 64), randn(9, 8, 32)
    step, b, d = randn(9, 8).abs(), randn(9, 1, 64), randn(8)
    alone, out = states.clone(), torch.empty_like(x)
    steps.state_space(states, x, torch.exp(-step), step, b, b, d, out)
    for row in range(9):
        own, last = alone[row : row + 1], torch.empty_like(x[:1])
        args = [t[row : row + 1].contiguous() for t in (x, torch.exp(-step), step, b, b)]
        steps.state_space(own, *args, d, last)
        assert torch.equal(last, out[row : row + 1])
    assert torch.equal(alone, states)
