"""Paged attention of every variant that this CPU runs, against torch in float64.

In bfloat16 the weights of the keys and the result are each rounded to 8 bits, by at most 2^-8: no
output may be further off than 2^-7 of the weighted mean of |V|. In float16 the result is, to 11.
The options are tested where backends are: tests/runner/cpu/test_attention.py.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from aioserve.kernels import Kernels, usable_variants

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["f32", "bf16", "f16"])


class Step(NamedTuple):
    """Rows of (new tokens, all tokens) over shuffled blocks; every slot of no row is NaN.

    Caches are [blocks, kv_heads, block_size, dim]; int8 ones have a scale of 4 bytes behind each
    vector.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    ends: Tensor | None = None  # of tokens, if some see further than themselves

    def run(self, kernels: Kernels, rows: slice = slice(None), **options: Any) -> Tensor:
        """Attention of some of the rows."""
        starts = self.query_start_loc[:-1][rows].tolist()
        ends = self.query_start_loc[1:][rows].tolist()
        query = self.query[starts[0] : ends[-1]]
        in_bytes = self.value_cache.dtype == torch.int8
        out = query.new_empty(*query.shape[:2], self.value_cache.shape[3] - 4 * in_bytes)
        settings: dict[str, Any] = {"scaling": self.query.shape[2] ** -0.5, "in_bytes": in_bytes}
        kernels.paged_attention(
            query,
            self.key_cache,
            self.value_cache,
            self.block_table[rows].contiguous(),
            torch.tensor([*starts, ends[-1]]) - starts[0],
            self.seq_lens[rows].contiguous(),
            out,
            ends=None if self.ends is None else self.ends[starts[0] : ends[-1]].contiguous(),
            **(settings | options),
        )
        return out


def make_step(
    rows: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (64, 64),
    block_size: int = 16,
    *,
    as_codes: bool = False,
) -> Step:
    generator = torch.Generator().manual_seed(len(rows))
    width = max(-(-length // block_size) for _, length in rows)
    num_blocks = width * len(rows)
    table = torch.randperm(num_blocks, generator=generator).int().view(len(rows), width)
    caches = []
    for dim in dims:
        shape = (num_blocks, heads[1], block_size)
        if as_codes:
            codes = torch.randint(-127, 128, (*shape, dim), generator=generator).to(torch.int8)
            numbers = (torch.rand(*shape, 1, generator=generator) + 0.5) / 40  # their scales
        else:
            numbers = torch.randn(*shape, dim, generator=generator)
        for blocks, (_, length) in zip(table.tolist(), rows, strict=True):
            for column, block in enumerate(blocks):
                numbers[block, :, max(0, length - column * block_size) :] = float("nan")
        caches.append(
            torch.cat((codes, numbers.view(torch.int8)), -1) if as_codes else numbers.to(dtype)
        )
    new = [tokens for tokens, _ in rows]
    query = torch.randn(sum(new), heads[0], dims[0], generator=generator).to(dtype)
    return Step(
        query,
        caches[0],
        caches[1],
        table,
        torch.from_numpy(np.cumsum([0, *new])),
        torch.tensor([length for _, length in rows]),
    )


def assert_close_to_reference(step: Step, out: Tensor, window: int | None = None) -> None:
    starts = step.query_start_loc.tolist()
    for row, length in enumerate(step.seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        query = step.query[tokens].double().transpose(0, 1)
        group = query.shape[0] // step.key_cache.shape[1]
        key, value = (
            cache[step.block_table[row].long()].transpose(0, 1).flatten(1, 2)[:, :length]
            for cache in (step.key_cache.double(), step.value_cache.double())
        )
        key, value = (x.repeat_interleave(group, dim=0) for x in (key, value))
        positions = torch.arange(length - query.shape[1], length)
        scores = query @ key.transpose(1, 2) * step.query.shape[2] ** -0.5
        seen = positions + 1 if step.ends is None else step.ends[tokens]
        scores.masked_fill_(torch.arange(length) >= seen[:, None], float("-inf"))
        if window is not None:
            unseen = torch.arange(length) <= positions[:, None] - window
            scores.masked_fill_(unseen, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        error = (out[tokens].double().transpose(0, 1) - weights @ value).abs()
        assert bool((error <= TOLERANCE[out.dtype] * (weights @ value.abs())).all())


MIXED = [(1, 1), (1, 300), (40, 40), (3, 1100), (17, 129), (130, 700)]


@DTYPES
@pytest.mark.parametrize("block_size", [1, 5, 16, 200])
def test_chunks_and_decodes_are_close_to_float64(
    kernels: Kernels, dtype: torch.dtype, block_size: int
) -> None:
    step = make_step(MIXED, dtype, block_size=block_size)
    assert_close_to_reference(step, step.run(kernels))


@pytest.mark.parametrize("window", [None, 100])
def test_scores_that_rise_along_a_context_are_close_to_float64(
    kernels: Kernels, window: int | None
) -> None:
    """By more than floats have room for above those of the first keys, also on the diagonal."""
    step = make_step(MIXED, torch.bfloat16)
    for blocks, length in zip(step.block_table.tolist(), step.seq_lens.tolist(), strict=True):
        for position in range(length):
            step.key_cache[blocks[position // 16], :, position % 16] *= 1 + position // 5
    together = step.run(kernels, sliding_window=window)
    assert_close_to_reference(step, together, window)
    alone = [step.run(kernels, slice(row, row + 1), sliding_window=window) for row in range(6)]
    assert torch.equal(torch.cat(alone), together)


def test_numbers_too_small_for_their_exponent_are_kept_after_attention(kernels: Kernels) -> None:
    """By AMX weights of that size become 0 meanwhile."""
    step = make_step(MIXED, torch.bfloat16)
    step.key_cache.mul_(30)
    assert_close_to_reference(step, step.run(kernels))
    assert float((torch.full((64,), 1e-40) * 0.5).min()) > 0


def with_images(step: Step) -> Step:
    """The second half of each row's new tokens see each other, but for the last of many."""
    ends = []
    counts = step.query_start_loc.diff().tolist()
    for tokens, length in zip(counts, step.seq_lens.tolist(), strict=True):
        own = torch.arange(length - tokens, length) + 1
        own[tokens // 2 : tokens - tokens // 10] = length - tokens // 10
        ends.append(own)
    return step._replace(ends=torch.cat(ends))


@DTYPES
@pytest.mark.parametrize("heads", [(6, 2), (1, 1), (9, 1)])
def test_tokens_that_see_ahead_are_close_to_float64_and_have_the_same_bits_alone(
    kernels: Kernels, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    step = with_images(make_step(MIXED, dtype, heads))
    together = step.run(kernels)
    assert_close_to_reference(step, together)
    assert not torch.equal(together, step._replace(ends=None).run(kernels))
    alone = [step.run(kernels, slice(row, row + 1)) for row in range(len(MIXED))]
    assert torch.equal(torch.cat(alone), together)


@DTYPES
@pytest.mark.parametrize(
    "dims", [(80, 96), *(pytest.param(d, marks=pytest.mark.slow) for d in [(16, 16), (256, 128)])]
)
def test_any_multiple_of_16_and_any_group_is_served(
    kernels: Kernels, dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    for heads in [(8, 8), (200, 1), *((group, 1) for group in range(1, 10))]:
        step = make_step([(1, 140), (2, 77), (20, 33)], dtype, heads, dims)
        assert_close_to_reference(step, step.run(kernels))


@pytest.mark.parametrize(
    ("dtype", "as_codes"),
    [*((dtype, False) for dtype in TOLERANCE), (torch.bfloat16, True)],
    ids=["f32", "bf16", "f16", "codes"],
)
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_gets_the_same_bits_alone_and_with_any_number_of_threads(
    kernels: Kernels, dtype: torch.dtype, as_codes: bool, window: int | None
) -> None:
    step = make_step(MIXED, dtype, as_codes=as_codes)
    together = step.run(kernels, sliding_window=window)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(step.run(kernels, sliding_window=window), together)
    finally:
        torch.set_num_threads(threads)
    alone = [step.run(kernels, slice(row, row + 1), sliding_window=window) for row in range(6)]
    assert torch.equal(torch.cat(alone), together)


@DTYPES
@pytest.mark.parametrize(("heads", "block_size"), [((6, 2), 16), ((9, 1), 200)])
def test_rows_that_share_a_prefix_get_the_bits_that_each_gets_alone(
    kernels: Kernels, dtype: torch.dtype, heads: tuple[int, int], block_size: int
) -> None:
    lengths = [1100, 530, 513, 40, 1025, 512, 1090, 620]
    step = make_step([*((1, length) for length in lengths), (3, 700), (20, 600), (3, 640)],
                     dtype, heads, (32, 32), block_size)  # fmt: skip
    tokens, table = step.query_start_loc.diff(), step.block_table
    for row, whole in enumerate(((step.seq_lens - tokens) // block_size).tolist()):
        table[row, :whole] = table[[0, 6][row % 2], :whole]  # two prefixes, in turn
    sinks = torch.linspace(-1, 1, heads[0])
    alone = [step.run(kernels, slice(row, row + 1), sinks=sinks) for row in range(len(table))]
    together = step.run(kernels, sinks=sinks)
    assert bool(together.isfinite().all())
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize(
    ("dtype", "as_codes", "in_bytes"),
    [
        *((dtype, False, False) for dtype in TOLERANCE),
        *((torch.bfloat16, True, in_bytes) for in_bytes in (False, True)),
    ],
    ids=["f32", "bf16", "f16", "codes", "bytes"],
)
@pytest.mark.parametrize("window", [None, 100, 600])
@pytest.mark.parametrize(("heads", "dim"), [((6, 2), 64), ((9, 1), 64), ((2, 2), 80)])
def test_drafts_that_are_verified_get_the_bits_of_decodes(
    kernels: Kernels,
    dtype: torch.dtype,
    as_codes: bool,
    in_bytes: bool,
    window: int | None,
    heads: tuple[int, int],
    dim: int,
) -> None:
    """Contexts end on both sides of where they are cut, as what a token sees begins."""
    rows = [(9, 20), (2, 77), (16, 520), (9, 1030), (5, 1115), (7, 1627)]
    step = make_step(rows, dtype, heads, (dim, dim), as_codes=as_codes)
    options = {"sliding_window": window, "sinks": torch.linspace(-1, 1, heads[0])}
    verified, starts = step.run(kernels, in_bytes=in_bytes, **options), step.query_start_loc
    for row, (count, length) in enumerate(rows):
        for token in range(count):
            place = int(starts[row]) + token
            decode = step._replace(
                query=step.query[place : place + 1],
                block_table=step.block_table[row : row + 1],
                query_start_loc=torch.tensor([0, 1]),
                seq_lens=torch.tensor([length - count + token + 1]),
            )
            alone = decode.run(kernels, in_bytes=in_bytes, **options)
            assert torch.equal(alone, verified[place : place + 1])


def test_queries_may_lie_in_a_wider_row(kernels: Kernels) -> None:
    step = make_step(MIXED, torch.bfloat16)
    wide = torch.cat([step.query, torch.zeros_like(step.query)], dim=1)[:, :6]
    assert torch.equal(step._replace(query=wide).run(kernels), step.run(kernels))


def test_a_query_that_is_not_a_number_gives_none(kernels: Kernels) -> None:
    step = make_step([(1, 40), (1, 50)], torch.float32)
    step.query[0] = float("nan")
    out = step.run(kernels)
    assert bool(out[0].isnan().all())
    assert bool(out[1].isfinite().all())
