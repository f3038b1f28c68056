"""Attention in bytes of every variant that this CPU runs, against float64 with the same rounding.

A query is rounded to 8 bits with one scale per token and head; weights times the scales of their
values are, with one scale per 32 positions. Sums are exact in both, so results differ as sums of
floats do, and by a step where a weight is so near a tie that the kernel may round it the other way:
what those steps are worth at most is added to the tolerance.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from aioserve.kernels import Kernels, usable_variants
from tests.kernels.test_paged_attention import MIXED, Step, with_images
from tests.kernels.test_paged_attention import make_step as make_step_of

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SUMMING = 2e-5  # of float32 sums and of powers of two, relative to the sum of sizes
NEAR_A_TIE = 5e-3  # steps
TOGETHER = 32  # positions whose weights share a scale

make_step = partial(make_step_of, as_codes=True)


def of_row(cache: Tensor, blocks: Tensor, length: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes [query heads, length, dim] and scales [query heads, length] of one row, in float64."""
    rows = cache[blocks.long()].transpose(0, 1).flatten(1, 2)[:, :length]
    rows = rows.repeat_interleave(group, dim=0)
    scales = rows[..., -4:].contiguous().view(torch.float32)[..., 0]
    return rows[..., :-4].double(), scales.double()


def expected(
    step: Step,
    row: int,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    in_bytes: bool = True,
) -> tuple[Tensor, Tensor]:
    """What the tokens of a row get [heads, tokens, dim], and by how much it may differ. Without
    `in_bytes`, of queries as they are, and of weights in bfloat16.
    """
    tokens = slice(*step.query_start_loc[row : row + 2].tolist())
    length = int(step.seq_lens[row])
    query = step.query[tokens].float().transpose(0, 1)
    group = query.shape[0] // step.key_cache.shape[1]
    blocks = step.block_table[row]
    keys, key_scales = of_row(step.key_cache, blocks, length, group)
    values, value_scales = of_row(step.value_cache, blocks, length, group)
    most = query.abs().amax(-1, keepdim=True)
    inverse = torch.div(torch.tensor(127.0), most)  # `127 / most` would round twice
    codes = (query * inverse).round().double()
    rounded_query = codes * most.double() / 127 if in_bytes else query.double()
    scores = rounded_query @ keys.transpose(1, 2) * key_scales[:, None]
    scores *= scaling or step.query.shape[2] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(length - query.shape[1], length)[:, None]
    ends = positions + 1 if step.ends is None else step.ends[tokens, None]
    every = torch.arange(length)
    is_seen = every < ends
    if sliding_window:
        is_seen &= every > positions - sliding_window
    if chunk:
        is_seen &= every >= positions - positions % chunk
    scores.masked_fill_(~is_seen, float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks.double()[:, None, None])
    weights = torch.exp(scores - highest)
    totals = weights.sum(-1, keepdim=True)
    if sinks is not None:
        totals += torch.exp(sinks.double()[:, None, None] - highest)
    weights *= value_scales[:, None]
    if not in_bytes:
        return weights @ values / totals, 2**-7 * (weights @ values.abs() / totals)
    padded = torch.nn.functional.pad(weights, (0, -length % TOGETHER)).unflatten(-1, (-1, TOGETHER))
    steps = padded.amax(-1, keepdim=True).clamp_min(1e-30) / 255
    in_steps = padded / steps
    is_near = (in_steps - in_steps.floor() - 0.5).abs() < NEAR_A_TIE
    rounded = (in_steps.round() * steps).flatten(-2)[..., :length]
    slack = (is_near * steps).flatten(-2)[..., :length]
    out = rounded @ values / totals
    sizes = rounded @ values.abs() / totals
    return out, SUMMING * sizes + slack @ values.abs() / totals + ROUNDING[step.query.dtype] * sizes


def assert_as_expected(
    step: Step, out: Tensor, most_in_bytes: float = math.inf, **options: Any
) -> None:
    """Rows of more new tokens than `most_in_bytes` are not multiplied in bytes."""
    starts = step.query_start_loc.tolist()
    for row in range(len(step.seq_lens)):
        in_bytes = starts[row + 1] - starts[row] <= most_in_bytes
        should, tolerance = expected(step, row, in_bytes=in_bytes, **options)
        error = out[starts[row] : starts[row + 1]].double().transpose(0, 1) - should
        assert bool((error.abs() <= tolerance).all()), (row, float((error.abs() / tolerance).max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 200])
def test_chunks_and_decodes_are_those_of_float64(
    kernels: Kernels, dtype: torch.dtype, block_size: int
) -> None:
    step = make_step(MIXED, dtype, block_size=block_size)
    has_amx = kernels.variant == "amx_bf16" and dtype == torch.bfloat16
    assert_as_expected(step, step.run(kernels), most_in_bytes=16 if has_amx else math.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 100}, {"softcap": 3.0, "sinks": torch.linspace(-2, 2, 6)}],
)
def test_rows_of_many_tokens_keep_exact_attention_where_that_is_faster(
    kernels: Kernels, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """With AMX, in bfloat16; nowhere else."""
    step = make_step([(1, 300), (16, 600), (17, 600), (40, 40), (130, 700)], dtype)
    found, exact = (step.run(kernels, in_bytes=in_bytes, **options) for in_bytes in (True, False))
    tokens = step.query_start_loc.diff().tolist()
    has_amx = kernels.variant == "amx_bf16" and dtype == torch.bfloat16
    parts = zip(found.split(tokens), exact.split(tokens), strict=True)
    assert [torch.equal(*part) for part in parts] == [has_amx and count > 16 for count in tokens]


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 100},
        {"chunk": 70},
        {"softcap": 3.0},
        {"sinks": torch.linspace(-2, 2, 6)},
        {"scaling": 0.7},
        {"sliding_window": 33, "softcap": 20.0, "sinks": torch.linspace(3, 7, 6)},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_option_is_that_of_float64(kernels: Kernels, options: dict[str, Any]) -> None:
    step = make_step(MIXED)
    assert_as_expected(step, step.run(kernels, **options), **options)


@pytest.mark.parametrize(
    "dims", [(16, 16), (32, 32), (48, 80), (80, 96), (112, 64), (128, 128), (256, 256)]
)
def test_any_multiple_of_16_and_any_group_is_served(
    kernels: Kernels, dims: tuple[int, int]
) -> None:
    for heads in [(8, 8), (200, 1), *((group, 1) for group in range(1, 10))]:
        step = make_step([(1, 140), (2, 77), (20, 33)], heads=heads, dims=dims)
        assert_as_expected(step, step.run(kernels))


def test_tokens_that_see_ahead_see_what_float64_sees(kernels: Kernels) -> None:
    step = with_images(make_step(MIXED))
    assert_as_expected(step, step.run(kernels))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_saturate(kernels: Kernels, sign: int) -> None:
    """All codes and all numbers of the queries are 127 or -127, and so are whole sums."""
    step = make_step([(1, 200), (3, 640), (40, 90)], heads=(2, 1), dims=(256, 256))
    step.query.copy_(torch.where(step.query > 1, -1.0, 1.0))
    step.query[0] = step.query[1] = 1
    for cache in (step.key_cache, step.value_cache):
        cache[..., :-4] = torch.where(cache[..., :-4] > -100, 127, -127) * sign
    scaling = 1e-3  # the scores are small enough to weigh many keys
    assert_as_expected(step, step.run(kernels, scaling=scaling), scaling=scaling)


def means_of_seen(step: Step, row: int) -> Tensor:
    """What the tokens of a row get [tokens, heads, dim], in float64, if all scores are equal."""
    tokens, length = int(step.query_start_loc.diff()[row]), int(step.seq_lens[row])
    group = step.query.shape[1] // step.value_cache.shape[1]
    values, scales = of_row(step.value_cache, step.block_table[row], length, group)
    sums = (values * scales[..., None]).cumsum(1)
    means = sums / torch.arange(1, length + 1)[:, None]
    return means[:, length - tokens :].transpose(0, 1)


def test_equal_scores_give_the_exact_mean_of_seen_codes(kernels: Kernels) -> None:
    """With scales that are powers of two no weight is rounded, and none goes to an unseen key."""
    step = make_step([(1, 64), (1, 1024), (1, 40), (20, 45)])
    step.query.zero_()
    for cache in (step.key_cache, step.value_cache):
        scales = cache[..., -4:].contiguous().view(torch.float32)
        cache[..., -4:] = torch.where(scales.isnan(), scales, 0.25).view(torch.int8)
    out = step.run(kernels).double()
    for row, own in enumerate(out.split(step.query_start_loc.diff().tolist())):
        torch.testing.assert_close(own, means_of_seen(step, row), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("heads", "block_size"), [((6, 2), 16), ((9, 1), 200)])
def test_rows_that_share_a_prefix_get_the_bits_that_each_gets_alone(
    kernels: Kernels, heads: tuple[int, int], block_size: int
) -> None:
    lengths = [1100, 530, 513, 40, 1025, 512, 1090, 620]
    rows = [*((1, length) for length in lengths), (3, 700), (20, 600), (3, 640)]
    step = make_step(rows, torch.float32, heads, (32, 32), block_size)
    tokens, table = step.query_start_loc.diff(), step.block_table
    for row, whole in enumerate(((step.seq_lens - tokens) // block_size).tolist()):
        table[row, :whole] = table[[0, 6][row % 2], :whole]  # two prefixes, in turn
    alone = [step.run(kernels, slice(row, row + 1)) for row in range(len(table))]
    together = step.run(kernels)
    assert bool(together.isfinite().all())
    assert torch.equal(torch.cat(alone), together)
    assert_as_expected(step, together)


def test_a_query_that_is_not_a_number_gives_none(kernels: Kernels) -> None:
    step = make_step([(1, 40), (1, 50), (1, 60), (20, 30)])
    step.query[0, :, 3] = float("nan")
    step.query[2, 0, 5] = float("-inf")
    out = step.run(kernels, softcap=5.0)
    assert bool(out[0].isnan().all())
    assert bool(out[2, 0].isnan().all())
    assert bool(out[2, 1:].isfinite().all())
    assert bool(out[[1, *range(3, 23)]].isfinite().all())


def test_queries_and_values_of_next_to_nothing_are_no_infinities(kernels: Kernels) -> None:
    """The inverse of so small a number may be infinite: such a query weighs all it sees equally."""
    step = make_step([(1, 64), (1, 64), (1, 40), (20, 45)])
    step.query[0] = step.query[2:] = 1e-35
    out = step.run(kernels).double().split(step.query_start_loc.diff().tolist())
    for row in (0, 2, 3):
        error = (out[row] - means_of_seen(step, row)).abs()
        assert float(error.max()) < 0.03, row  # of numbers up to 5
    step.value_cache[..., -4:] = torch.tensor([1e-36]).view(torch.int8)
    assert not bool(step.run(kernels).any())
