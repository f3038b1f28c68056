"""Paged attention on the CPU without compiled kernels: in plain torch, or whole rows for a model.

The queries of a step are cut into items of at most `QUERY_BLOCK` tokens of one row, decodes and
prompt chunks alike; items of like shape form a group; a group gathers its KV blocks once per layer
and is two batched products. Begins with K and V as int8: codes of a token and head, and behind them
their scale. Knows nothing about requests.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.runner.attention.backend import (
    SCALE_BYTES,
    AttentionOptions,
    IntArray,
    KVCacheSpec,
    Row,
    RowStates,
    StepInputs,
    WindowLayers,
    ends_seen,
)
from aioserve.runner.cpu.kv_memory import AttentionBackend

# Not `scaled_dot_product_attention`: on one core it took 7 times as long for 48 decodes at 512
# tokens and, in bfloat16, 3 times as long for a chunk of 128 at 2,048.
QUERY_BLOCK = 128  # longer ones waste causally masked work, shorter ones gather KV more often
GROUP_ELEMENTS = 1 << 21  # gathered keys, or scores, of one pass: what should stay in the caches
MAX_PADDING = 0.25  # share of a group's longest context that shorter ones may waste


def encode_rows(states: Tensor) -> Tensor:
    """[..., D] in float32 -> [..., D + 4] int8: codes, and the bytes of the scale of all of them.

    As the kernels do it, to the bit (`store_row_of_codes` in C).
    """
    most = states.abs().amax(dim=-1, keepdim=True).clamp(max=3.39e38)  # 127 * scale is finite
    most[most < 1e-30] = math.inf  # too small for an inverse: zeros
    largest = torch.tensor(127.0)  # `127 / most` would be 127 * (1 / most), rounded twice
    codes = torch.round(states * (largest / most)).to(torch.int8)
    scales = torch.where(most.isinf(), 0.0, most / largest)
    return torch.cat([codes, scales.view(torch.int8)], dim=-1)


def decode_rows(rows: Tensor) -> Tensor:
    """Return the numbers that `encode_rows` was given, rounded."""
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous()
    return codes.float() * scales.view(torch.float32)


class TorchPagedAttention(AttentionBackend):
    """Gathers whole blocks: what was never written there is zero, so masking can hide it."""

    def __init__(
        self,
        spec: KVCacheSpec,
        num_kv_blocks: int,
        block_size: int,
        windows: WindowLayers | None = None,
    ) -> None:
        super().__init__(spec, num_kv_blocks, block_size, windows)
        self._block_size = block_size
        self._plan: _StepPlan | None = None
        self._window_plan: _StepPlan | None = None

    def prepare(self, step: StepInputs) -> None:
        self._plan = self._window_plan = _StepPlan(step, self._block_size)
        if step.windows is not None:
            self._window_plan = _StepPlan(step.windows, self._block_size)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        plan = self._window_plan if layer in self.window_layers else self._plan
        assert plan is not None, "prepare() first"
        key_cache, value_cache = self.key_caches[layer], self.value_caches[layer]
        slots = plan.cache_slots(key.shape[1])
        _store(key_cache, slots, key)
        _store(value_cache, slots, value)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        shape = _LayerShape(
            options.sliding_window, options.chunk, query.shape[1], key.shape[1], key.shape[2]
        )
        for group in plan.groups(shape):
            for heads in group.passes:
                attend_group(group, heads, query, key_cache, value_cache, out, options)
        return out


class _LayerShape(NamedTuple):
    """The properties of a layer that decide how its items are grouped."""

    window: int | None
    chunk: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Group:
    """B items of Q queries each, padded to one context length of L tokens (whole blocks)."""

    size: int  # B
    queries: Tensor  # [B * Q] packed tokens; a padded query repeats the last one of its item
    kv_rows: Tensor  # [B, Hkv, L / block_size] rows of the cache seen as [blocks * Hkv, ...]
    hidden: Tensor  # [B, 1, 1, Q, L]: where the query may not look
    passes: list[slice]  # KV heads to take at once


class _StepPlan:
    """The work items of one step, and their grouping per kind of layer (made on first use)."""

    def __init__(self, step: StepInputs, block_size: int) -> None:
        self._block_size = block_size
        self._block_table = step.block_table
        self._slot_mapping = step.slot_mapping
        self._positions, self._image_ends = step.positions, step.image_ends
        query_lens = np.diff(step.query_start_loc)
        items_per_row = -(-query_lens // QUERY_BLOCK)
        row = np.repeat(np.arange(len(query_lens)), items_per_row)
        first_item = np.cumsum(items_per_row) - items_per_row
        offset = (np.arange(len(row)) - first_item[row]) * QUERY_BLOCK
        self._row = row
        self._query_len = np.minimum(QUERY_BLOCK, query_lens[row] - offset)
        self._token = step.query_start_loc[row] + offset  # of the item's first query
        self._position = step.seq_lens[row] - query_lens[row] + offset  # of that query
        self._cache_slots: dict[int, Tensor] = {}
        self._groups: dict[_LayerShape, list[Group]] = {}

    def cache_slots(self, num_kv_heads: int) -> Tensor:
        """[T * Hkv] rows of the cache seen as [blocks * Hkv * block_size, head_dim]."""
        slots = self._cache_slots.get(num_kv_heads)
        if slots is None:
            block, offset = np.divmod(self._slot_mapping, self._block_size)
            rows = block[:, None] * num_kv_heads + np.arange(num_kv_heads)
            rows = rows * self._block_size + offset[:, None]
            slots = self._cache_slots[num_kv_heads] = torch.from_numpy(rows.reshape(-1))
        return slots

    def groups(self, shape: _LayerShape) -> list[Group]:
        """Return all items, so grouped that padding and the size of a pass are bounded."""
        groups = self._groups.get(shape)
        if groups is None:
            groups = self._groups[shape] = self._make_groups(shape)
        return groups

    def _make_groups(self, shape: _LayerShape) -> list[Group]:
        first_block = np.zeros_like(self._position)
        if shape.window is not None:
            first_block = np.maximum(self._position + 1 - shape.window, 0) // self._block_size
        if shape.chunk is not None:
            first_block = np.maximum(
                first_block, self._position // shape.chunk * shape.chunk // self._block_size
            )
        ends = ends_seen(self._image_ends, self._positions, shape.window)
        num_blocks = -(-ends[self._token + self._query_len - 1] // self._block_size) - first_block
        padded_len = 1 << np.ceil(np.log2(self._query_len)).astype(np.int64)
        order = np.lexsort((-num_blocks, padded_len))  # like lengths together, longest first
        groups = []
        while len(order):
            query_len, longest = int(padded_len[order[0]]), int(num_blocks[order[0]])
            per_head = max(shape.num_heads // shape.num_kv_heads * query_len, shape.head_dim)
            heads_at_once = GROUP_ELEMENTS // (longest * self._block_size * per_head)
            candidates = order[: max(1, heads_at_once // shape.num_kv_heads)]
            unlike = (padded_len[candidates] != query_len) | (
                num_blocks[candidates] < longest * (1 - MAX_PADDING) - 1
            )
            items = candidates[: int(unlike.argmax()) if unlike.any() else None]
            step = min(max(1, heads_at_once), shape.num_kv_heads)
            passes = [slice(h, h + step) for h in range(0, shape.num_kv_heads, step)]
            groups.append(
                self._make_group(items, query_len, first_block, longest, shape, ends, passes)
            )
            order = order[len(items) :]
        return groups

    def _make_group(
        self,
        items: IntArray,
        query_len: int,
        first_block: IntArray,
        num_blocks: int,
        shape: _LayerShape,
        ends: IntArray,
        passes: list[slice],
    ) -> Group:
        query = np.minimum(np.arange(query_len), self._query_len[items, None] - 1)  # [B, Q]
        column = first_block[items, None] + np.arange(num_blocks)
        # columns beyond a row's own table are masked below: any block will do there
        column_in_table = np.minimum(column, self._block_table.shape[1] - 1)
        blocks = self._block_table[self._row[items, None], column_in_table].astype(np.int64)
        kv_rows = blocks[:, None] * shape.num_kv_heads + np.arange(shape.num_kv_heads)[:, None]
        key_position = first_block[items, None, None] * self._block_size + np.arange(
            num_blocks * self._block_size
        )
        position = (self._position[items, None] + query)[:, :, None]
        token = self._token[items, None] + query
        hidden = key_position >= ends[token][:, :, None]
        if shape.window is not None:
            hidden |= key_position <= position - shape.window
        if shape.chunk is not None:
            hidden |= key_position < position // shape.chunk * shape.chunk
        return Group(
            size=len(items),
            queries=torch.from_numpy(token.reshape(-1)),
            kv_rows=torch.from_numpy(kv_rows),
            hidden=torch.from_numpy(hidden)[:, None, None],
            passes=passes,
        )


def _store(cache: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write `states` [T, Hkv, D] into the cache.

    Non-finite numbers become 0: a block is reused by other requests, and what is masked there is
    multiplied by 0, which only a finite number survives.
    """
    row = cache.shape[-1]
    states = torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0)
    if cache.dtype is torch.int8:
        states = encode_rows(states.float())
    cache.view(-1, row).index_copy_(0, slots, states.reshape(-1, row))


def _gather(cache: Tensor, kv_rows: Tensor) -> Tensor:
    """[B, H, blocks] rows of one head's blocks -> [B * H, L, D] in float32."""
    _, _, block_size, row = cache.shape
    rows = F.embedding(kv_rows, cache.view(-1, block_size * row))  # whole blocks: fast copies
    rows = rows.view(kv_rows.shape[0] * kv_rows.shape[1], -1, row)
    return decode_rows(rows) if cache.dtype is torch.int8 else rows.float()


def attend_group(
    group: Group,
    heads: slice,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    options: AttentionOptions,
) -> None:
    """Attention of one group over some of its KV heads, written into `out` [T, Hq, Dv]."""
    kv_rows = group.kv_rows[:, heads]
    size, num_kv_heads, _ = kv_rows.shape
    queries_per_kv = query.shape[1] // key_cache.shape[1]
    query_heads = slice(heads.start * queries_per_kv, heads.stop * queries_per_kv)
    # In float32, as fused attention computes: scores and weights rounded to two bytes had logits
    # three times as far from the reference's.
    key, value = _gather(key_cache, kv_rows), _gather(value_cache, kv_rows)

    # [B * Q, Hq, D] -> [B * Hkv, queries_per_kv * Q, D]: all queries of a KV head in one product
    q = query[:, query_heads].index_select(0, group.queries)
    q = q.view(size, -1, num_kv_heads, queries_per_kv, q.shape[-1]).permute(0, 2, 3, 1, 4)
    q = q.reshape(size * num_kv_heads, -1, q.shape[-1]).float()
    scores = q.new_empty(q.shape[0], q.shape[1], key.shape[1])
    torch.baddbmm(scores, q, key.transpose(1, 2), beta=0, alpha=options.scaling, out=scores)
    by_head = scores.view(size, num_kv_heads, queries_per_kv, -1, key.shape[1])
    if options.softcap is not None:
        torch.tanh_(by_head.div_(options.softcap)).mul_(options.softcap)
    # filled, not added: scores with what others left may be infinite
    by_head.masked_fill_(group.hidden, float("-inf"))
    if options.sinks is None:
        probs = torch.softmax(scores, dim=-1)
    else:
        sink = options.sinks[query_heads].view(1, num_kv_heads, queries_per_kv, 1, 1)
        probs = _softmax_with_sinks(by_head, sink).view_as(scores)
    attended = torch.bmm(probs, value)
    attended = attended.view(size, num_kv_heads, queries_per_kv, -1, value.shape[-1])
    attended = attended.permute(0, 3, 1, 2, 4).reshape(len(group.queries), -1, value.shape[-1])
    out[:, query_heads].index_copy_(0, group.queries, attended.to(out.dtype))


def _softmax_with_sinks(scores: Tensor, sink: Tensor) -> Tensor:
    """Softmax over the last axis and one more logit, `sink`, whose share is dropped."""
    sink = sink.float()
    highest = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink - highest)
    return weights / total


# Whole rows out of the paged cache, for models that compute attention themselves. Gathers a row's K
# and V once per layer. Knows blocks and slots; knows nothing about models.


class PagedRows(AttentionBackend, RowStates):
    """A token's numbers lie side by side, whatever heads they are of: one head per layer."""

    description = "its own"

    def __init__(self, spec: KVCacheSpec, num_kv_blocks: int, block_size: int) -> None:
        super().__init__(spec, num_kv_blocks, block_size)
        self._block_size = block_size

    def prepare(self, step: StepInputs) -> None:
        bounds, lengths = step.query_start_loc.tolist(), step.seq_lens.tolist()
        self._rows = [Row(*row) for row in zip(bounds[:-1], bounds[1:], lengths, strict=True)]
        self._new_slots = torch.from_numpy(step.slot_mapping)
        self._block_table = torch.from_numpy(step.block_table).long()
        self._slots: tuple[int, Tensor] = (-1, self._new_slots)  # of all tokens of one row

    @property
    def rows(self) -> list[Row]:
        return self._rows

    def extend(self, layer: int, row: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        new = self._new_slots[self._rows[row].begin : self._rows[row].end]
        found = []
        for cache, states in ((self.key_caches[layer], key), (self.value_caches[layer], value)):
            flat = cache.view(-1, cache.shape[-1])
            flat.index_copy_(0, new, states.to(cache.dtype))
            found.append(flat.index_select(0, self._slots_of(row)))
        return found[0], found[1]

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        raise AssertionError("a model that reads rows computes attention itself")

    def _slots_of(self, row: int) -> Tensor:
        """Return the slots of a row for all its layers, as rows are computed one after another."""
        if self._slots[0] != row:
            position = torch.arange(self._rows[row].seq_len)
            block = self._block_table[row, position // self._block_size]
            self._slots = (row, block * self._block_size + position % self._block_size)
        return self._slots[1]
