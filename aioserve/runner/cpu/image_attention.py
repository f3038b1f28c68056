"""Attention of images whose tokens see each other, in both directions (Gemma 3, Gemma 4).

All else of a step is computed as ever, as if they saw only what is before them; then their rows are
computed again, in plain torch. Knows tokens and blocks; knows nothing about models.
"""

import numpy as np
import torch
from torch import Tensor

from aioserve.runner.attention.backend import AttentionOptions, LayerAttention, StepInputs
from aioserve.runner.cpu.attention import AttentionBackend, Group, attend_group


class BidirectionalImageAttention(LayerAttention):
    """Attention of one step in which tokens of an image see each other; `backend` is prepared for
    the step.
    """

    def __init__(
        self, backend: AttentionBackend, step: StepInputs, block_size: int, only_in_windows: bool
    ) -> None:
        """`only_in_windows`: whether layers that see everything before keep to that."""
        self._backend, self._step, self._block_size = backend, step, block_size
        self._only_in_windows = only_in_windows
        self._groups: dict[tuple[bool, int | None, int], list[Group]] = {}

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """As `LayerAttention.forward`, but tokens of the same image see each other."""
        out = self._backend.forward(layer, query, key, value, options)
        if self._only_in_windows and options.sliding_window is None:
            return out
        caches = self._backend.key_caches[layer], self._backend.value_caches[layer]
        is_own = layer in self._backend.window_layers
        kind = (is_own, options.sliding_window, key.shape[1])
        if kind not in self._groups:
            self._groups[kind] = self._make_groups(*kind)
        for group in self._groups[kind]:
            for heads in group.passes:
                attend_group(group, heads, query, *caches, out, options)
        return out

    def _make_groups(self, is_own: bool, window: int | None, num_kv_heads: int) -> list[Group]:
        """One of each image, in the window if there is one, over what is before its end."""
        step, size = self._step, self._block_size
        table = step.block_table
        if is_own:
            assert step.windows is not None, "such layers have blocks of their own"
            table = step.windows.block_table
        groups = []
        for row, begin, end in step.together:
            start = step.query_start_loc[row] - step.positions[step.query_start_loc[row]]
            query = np.arange(begin, end)
            first = 0 if window is None else max(begin + 1 - window, 0) // size
            blocks = table[row, first : -(-end // size)].astype(np.int64)
            key = first * size + np.arange(len(blocks) * size)
            hidden = np.broadcast_to(key >= end, (len(query), len(key)))
            if window is not None:
                hidden = hidden | (key <= query[:, None] - window)
            rows = blocks * num_kv_heads + np.arange(num_kv_heads)[:, None]
            groups.append(
                Group(
                    size=1,
                    queries=torch.from_numpy(query + start),
                    kv_rows=torch.from_numpy(rows[None]),
                    hidden=torch.from_numpy(hidden.copy())[None, None, None],
                    passes=[slice(head, head + 1) for head in range(num_kv_heads)],
                )
            )
        return groups
