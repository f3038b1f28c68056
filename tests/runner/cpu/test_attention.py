"""Paged attention against a naive loop over tokens and heads, on shuffled shared blocks."""

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aioserve.kernels import Kernels
from aioserve.runner.attention.backend import (
    AttentionOptions,
    ImageEnds,
    IntArray,
    KVCacheSpec,
    LayerSpec,
    StepInputs,
)
from aioserve.runner.cpu import torch_attention
from aioserve.runner.cpu.attention import CompiledAttention
from aioserve.runner.cpu.torch_attention import TorchPagedAttention
from aioserve.runner.loader import named_dtype
from tests.slow import mostly_slow
from tests.variants import DTYPE, EVERY_VARIANT

BLOCK_SIZE = 4
TOLERANCE = {
    "float32": {"rtol": 1e-4, "atol": 1e-5},
    # plain torch also rounds scores and weights
    "float16": {"rtol": 0.01, "atol": 0.01},
    "bfloat16": {"rtol": 0.1, "atol": 0.1},
}
Images = dict[int, list[tuple[int, int]]]
MakeBackend = Callable[[KVCacheSpec, int, int], CompiledAttention | TorchPagedAttention]


def compiled_backend(variant: str) -> MakeBackend:
    return partial(CompiledAttention, Kernels(variant))


@pytest.fixture(params=EVERY_VARIANT)
def make_backend(request: pytest.FixtureRequest) -> MakeBackend:
    """Every variant of the kernels that this CPU runs, and plain torch."""
    return TorchPagedAttention if request.param == "off" else compiled_backend(request.param)


_known: dict[bytes, Tensor] = {}


def naive_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """What `loop` computes, once for the same numbers: every backend is given the same ones."""
    asked = repr({n: v.tolist() if isinstance(v, Tensor) else v for n, v in options.items()})
    told = hashlib.sha256(asked.encode())
    for states in (query, key, value):
        told.update(repr(states.shape).encode() + states.numpy().tobytes())
    if told.digest() not in _known:
        _known[told.digest()] = loop(query, key, value, **options)
    return _known[told.digest()]


def loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    ends: list[int] | None = None,
) -> Tensor:
    """One sequence: `query` [T, Hq, D], the last T tokens of `key` and `value` [L, Hkv, D]. `ends`
    are those of the L tokens that see further than themselves.
    """
    num_queries, num_heads, _ = query.shape
    offset = key.shape[0] - num_queries
    group = num_heads // key.shape[1]
    out = query.new_empty(num_queries, num_heads, value.shape[2])
    for token in range(num_queries):
        end = offset + token + 1
        begin = max(0, end - sliding_window) if sliding_window is not None else 0
        if chunk is not None:
            begin = max(begin, (end - 1) // chunk * chunk)
        end = end if ends is None else ends[end - 1]
        for head in range(num_heads):
            scores = key[begin:end, head // group] @ query[token, head] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            weights = torch.softmax(scores, dim=0)[: end - begin]
            out[token, head] = weights @ value[begin:end, head // group]
    return out


class PagedSequences:
    """Sequences of random K and V, run through a backend in chunks of given lengths."""

    def __init__(
        self,
        make_backend: MakeBackend,
        lengths: list[int],
        num_kv_heads: int,
        dims: tuple[int, int],
        dtype: str = DTYPE,
    ) -> None:
        generator = self.generator = torch.Generator().manual_seed(0)
        key_dim, value_dim = dims
        self.keys, self.values = (
            [
                torch.randn(n, num_kv_heads, dim, generator=generator).to(named_dtype(dtype))
                for n in lengths
            ]
            for dim in dims
        )
        self.tolerance = TOLERANCE[dtype]
        width = max(-(-n // BLOCK_SIZE) for n in lengths)
        blocks = list(range(width * len(lengths)))
        random.Random(0).shuffle(blocks)
        self.block_table = np.array(blocks, dtype=np.int32).reshape(len(lengths), width)
        layer = LayerSpec(num_kv_heads, key_dim, value_dim)
        spec = KVCacheSpec((layer,), named_dtype(dtype))
        self.backend = make_backend(spec, len(blocks), BLOCK_SIZE)
        # what was never written, and what others left behind, must not matter
        for cache in (*self.backend.key_caches, *self.backend.value_caches):
            cache.fill_(1e4)
        self.computed = [0] * len(lengths)

    def fill_past(self) -> None:
        """Put K and V of the tokens that count as computed into the cache."""
        for row, num_computed in enumerate(self.computed):
            positions = np.arange(num_computed)
            blocks = torch.from_numpy(self.block_table[row, positions // BLOCK_SIZE]).long()
            offsets = torch.from_numpy(positions % BLOCK_SIZE)
            for cache, states in (
                (self.backend.key_caches[0], self.keys[row]),
                (self.backend.value_caches[0], self.values[row]),
            ):
                cache[blocks, :, offsets] = states[:num_computed]

    def step(
        self,
        chunks: dict[int, int],
        num_heads: int,
        images: Images | None = None,
        *,
        only_in_windows: bool = False,
        **options: Any,
    ) -> None:
        """Run `chunks[sequence]` more tokens of some sequences and compare with the loop. `images`
        are ranges of positions of a sequence whose tokens see each other.
        """
        rows = np.array(list(chunks))
        lens = np.array(list(chunks.values()))
        computed = np.array([self.computed[row] for row in rows])
        starts = np.concatenate([[0], np.cumsum(lens)])
        positions = np.concatenate([c + np.arange(n) for c, n in zip(computed, lens, strict=True)])
        token_row = np.repeat(rows, lens)
        slots = self.block_table[token_row, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        inputs = StepInputs(
            req_ids=[str(row) for row in rows],
            rows=rows,
            input_ids=positions,
            positions=positions,
            slot_mapping=slots + positions % BLOCK_SIZE,
            query_start_loc=starts,
            seq_lens=computed + lens,
            block_table=self.block_table[rows],
            sampling=np.arange(len(rows)),
            logits_indices=starts[1:] - 1,
            image_ends=self._image_ends(chunks, images or {}, positions, only_in_windows),
        )
        like = self.keys[0]
        queries = [
            torch.randn(n, num_heads, like.shape[2], generator=self.generator).to(like.dtype)
            for n in lens
        ]
        ends = [self.computed[row] + n for row, n in chunks.items()]

        def packed(states: list[Tensor]) -> Tensor:
            return torch.cat(
                [
                    states[row][self.computed[row] : end]
                    for row, end in zip(chunks, ends, strict=True)
                ]
            )

        see_ahead = images and not (only_in_windows and "sliding_window" not in options)

        def seen(row: int, end: int) -> list[int] | None:
            if not see_ahead:
                return None
            found = list(range(1, end + 1))
            for first, last in images.get(row, ()) if images else ():
                found[first:last] = [last] * (last - first)
            return found

        self.backend.prepare(inputs)
        out = self.backend.forward(
            0,
            torch.cat(queries),
            packed(self.keys),
            packed(self.values),
            AttentionOptions(**options),
        )
        expected = [
            naive_attention(
                query.float(),
                self.keys[row][:end].float(),
                self.values[row][:end].float(),
                ends=seen(row, end),
                **options,
            )
            for query, row, end in zip(queries, chunks, ends, strict=True)
        ]
        torch.testing.assert_close(out.float(), torch.cat(expected), **self.tolerance)
        for row, end in zip(chunks, ends, strict=True):
            self.computed[row] = end

    def _image_ends(
        self, chunks: dict[int, int], images: Images, positions: IntArray, only_in_windows: bool
    ) -> ImageEnds | None:
        places, start = [], 0
        for row, count in chunks.items():
            begin = self.computed[row]
            for first, last in images.get(row, ()):
                if begin <= first and last <= begin + count:
                    places.append(np.arange(first, last) - begin + start)
            start += count
        return ImageEnds.of(positions, places, only_in_windows=only_in_windows)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"scaling": 0.25},
    "scaling": {"scaling": 1.3},
    "window": {"scaling": 0.25, "sliding_window": 7},
    "window of one": {"scaling": 0.25, "sliding_window": 1},
    "chunks": {"scaling": 0.25, "chunk": 7},
    "chunks of one": {"scaling": 0.25, "chunk": 1},
    "softcap": {"scaling": 0.5, "softcap": 2.0},
    "sinks": {"scaling": 0.25, "sinks": torch.linspace(-2, 3, 6)},
    "all": {"scaling": 0.7, "sliding_window": 9, "softcap": 3.0, "sinks": torch.linspace(3, -1, 6)},
}


@contextmanager
def small_groups(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sizes that make tiny inputs take every turn of the grouping."""
    with patch.context() as p:
        p.setattr(torch_attention, "QUERY_BLOCK", 8)
        p.setattr(torch_attention, "GROUP_ELEMENTS", 500)
        yield


def run_mixed_steps(
    make_backend: MakeBackend, num_kv_heads: int, dtype: str = DTYPE, **options: Any
) -> None:
    lengths = [3, 20, 41, 70, 12]
    sequences = PagedSequences(make_backend, lengths, num_kv_heads, (16, 16), dtype)
    sequences.step({0: 1, 1: 11, 3: 37}, 6, **options)
    sequences.step({2: 40, 0: 1, 3: 5, 1: 3}, 6, **options)
    sequences.step({1: 1, 3: 1, 2: 1, 0: 1}, 6, **options)
    sequences.step({3: 27, 4: 12, 1: 5}, 6, **options)


@pytest.mark.parametrize("num_kv_heads", mostly_slow([1, 2, 6], but=[1, 6]))
@pytest.mark.parametrize("name", OPTIONS)
def test_chunks_and_decodes_equal_the_loop(
    make_backend: MakeBackend, name: str, num_kv_heads: int
) -> None:
    run_mixed_steps(make_backend, num_kv_heads, **OPTIONS[name])


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("name", OPTIONS)
def test_small_groups_of_the_torch_backend_equal_the_loop(
    name: str, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_groups(monkeypatch):
        run_mixed_steps(TorchPagedAttention, num_kv_heads, **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_contexts_of_many_pieces_equal_the_loop(make_backend: MakeBackend, name: str) -> None:
    """Longer than the tiles and pieces that the compiled kernels cut keys into."""
    sequences = PagedSequences(make_backend, [1500, 700], 2, dims=(32, 16))
    sequences.computed = [1200, 500]
    sequences.fill_past()
    sequences.step({0: 150, 1: 1}, 6, **OPTIONS[name])
    sequences.step({0: 1, 1: 3}, 6, **OPTIONS[name])


SEEING_AHEAD = ["plain", "window", "window of one", "softcap", "sinks", "all"]


@pytest.mark.parametrize("only_in_windows", [False, True])
@pytest.mark.parametrize("num_kv_heads", mostly_slow([1, 2, 6], but=[2]))
@pytest.mark.parametrize("name", SEEING_AHEAD)
def test_tokens_of_an_image_see_each_other_as_in_the_loop(
    make_backend: MakeBackend,
    name: str,
    num_kv_heads: int,
    only_in_windows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = {1: [(3, 6), (8, 19)], 3: [(0, 30), (38, 41)], 4: [(5, 12)]}
    wanted = OPTIONS[name] | {"only_in_windows": only_in_windows}
    with small_groups(monkeypatch):
        sequences = PagedSequences(make_backend, [3, 20, 41, 70, 12], num_kv_heads, (16, 16))
        sequences.step({0: 1, 1: 7, 3: 37}, 6, images, **wanted)
        sequences.step({2: 40, 0: 1, 3: 5, 1: 13, 4: 12}, 6, images, **wanted)
        sequences.step({3: 27, 0: 1, 2: 1}, 6, images, **wanted)


@pytest.mark.parametrize("name", SEEING_AHEAD)
def test_images_of_many_tiles_see_each_other_as_in_the_loop(
    make_backend: MakeBackend, name: str
) -> None:
    sequences = PagedSequences(make_backend, [1500, 700], 2, dims=(32, 16))
    sequences.computed = [1200, 505]
    sequences.fill_past()
    images = {0: [(1210, 1340)], 1: [(508, 520)]}
    sequences.step({0: 150, 1: 16}, 6, images, **OPTIONS[name])


def test_keys_and_values_may_differ_in_size(make_backend: MakeBackend) -> None:
    sequences = PagedSequences(make_backend, [20, 9], 2, dims=(48, 16))
    sequences.step({0: 13, 1: 9}, 4, scaling=0.2)
    sequences.step({0: 1}, 4, scaling=0.2)


def test_masked_slots_hide_whatever_was_written_there(make_backend: MakeBackend) -> None:
    sequences = PagedSequences(make_backend, [5, 5], 2, dims=(16, 16))
    healthy = sequences.values[0].clone(), sequences.keys[0].clone()
    sequences.values[0][:] = float("nan")
    sequences.keys[0][:] = float("inf")
    with pytest.raises(AssertionError):  # its own output is not what the loop says
        sequences.step({0: 5}, 2, scaling=1.0)
    sequences.values[0][:], sequences.keys[0][:] = healthy
    sequences.step({0: 2, 1: 5}, 2, scaling=1.0)
    assert math.isfinite(float(sequences.backend.value_caches[0].float().sum()))


@pytest.mark.parametrize("name", OPTIONS)
def test_scores_of_masked_slots_may_be_beyond_float16(make_backend: MakeBackend, name: str) -> None:
    """With what others left behind, which is large here."""
    run_mixed_steps(make_backend, 2, "float16", **OPTIONS[name] | {"scaling": 1.3})


def test_padding_of_a_group_is_bounded() -> None:
    lengths = np.array([5, 6, 7, 8, 90, 100, 400, 390])
    inputs = StepInputs(
        req_ids=[],
        rows=np.arange(8),
        input_ids=np.zeros(8, dtype=np.int64),
        positions=lengths - 1,
        slot_mapping=np.zeros(8, dtype=np.int64),
        query_start_loc=np.arange(9),
        seq_lens=lengths,
        block_table=np.zeros((8, 100), dtype=np.int32),
        sampling=np.arange(8),
        logits_indices=np.arange(8),
    )
    plan = torch_attention._StepPlan(inputs, BLOCK_SIZE)
    groups = plan.groups(torch_attention._LayerShape(None, None, 4, 2, 16))
    assert [(group.size, group.hidden.shape[-1]) for group in groups] == [
        (2, 400),
        (2, 100),
        (4, 8),
    ]
