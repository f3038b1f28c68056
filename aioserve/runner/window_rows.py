"""Block tables for layers with a sliding window: where a step's rows keep what those layers see.

Knows rows and blocks. What fell out of a window stands in a table as it was: nobody reads there.
"""

from dataclasses import replace

import numpy as np

from aioserve.kv_cache import WindowBlocks
from aioserve.runner.attention.backend import StepInputs


class WindowRows:
    """The tables of the rows of a batch, [rows, columns] of blocks."""

    def __init__(self, num_rows: int, num_columns: int, block_size: int) -> None:
        self._table = np.zeros((num_rows, num_columns), dtype=np.int32)
        self._block_size = block_size

    def extend(self, row: int, blocks: WindowBlocks) -> None:
        """A row has these, too."""
        self._table[row, blocks.first : blocks.first + len(blocks.block_ids)] = blocks.block_ids

    def of(self, step: StepInputs) -> StepInputs:
        """The same step, as such layers see it."""
        token_row = np.repeat(step.rows, np.diff(step.query_start_loc))
        block, offset = np.divmod(step.positions, self._block_size)
        slots = self._table[token_row, block].astype(np.int64) * self._block_size + offset
        table = self._table[step.rows, : step.block_table.shape[1]]
        return replace(step, slot_mapping=slots, block_table=table)
