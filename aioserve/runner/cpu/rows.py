"""Whole rows out of the paged cache, for models that compute attention themselves.

Gathers a row's K and V once per layer. Knows blocks and slots; knows nothing about models.
"""

import torch
from torch import Tensor

from aioserve.runner.attention.backend import (
    AttentionOptions,
    KVCacheSpec,
    Row,
    RowStates,
    StepInputs,
)
from aioserve.runner.cpu.attention import AttentionBackend


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
        """The slots of a row for all its layers, as rows are computed one after another."""
        if self._slots[0] != row:
            position = torch.arange(self._rows[row].seq_len)
            block = self._block_table[row, position // self._block_size]
            self._slots = (row, block * self._block_size + position % self._block_size)
        return self._slots[1]
