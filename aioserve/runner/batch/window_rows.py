"""Block tables for layers with a sliding window: where a step's rows keep what those layers see.

Knows rows and blocks. What fell out of a window stands in a table as it was: no layer reads it.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from aioserve.kv_cache import WindowBlocks, WindowPool
from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.batch.batch_part import BatchPart
from aioserve.scheduler.output import NewRequestData, SchedulerOutput


class WindowRows(BatchPart[None]):
    """The tables of the rows of a batch, [rows, columns] of blocks."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        super().__init__()
        num_columns = -(-(max_model_len + 1) // block_size)  # as `InputBatch` has
        self._table = np.zeros((num_rows, num_columns), dtype=np.int32)
        self._block_size = block_size

    def set(self, row: int, request: NewRequestData) -> None:
        self.rows[row] = None  # its blocks come with its first step

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        """`StepInputs.windows` is the same step, as such layers see it."""
        told: Mapping[str, WindowBlocks] = step.parts.get(WindowPool.name, {})
        if told:
            for request_id, row in zip(inputs.req_ids, inputs.rows.tolist(), strict=True):
                if (new := told.get(request_id)) is not None:
                    self._table[row, new.first : new.first + len(new.block_ids)] = new.block_ids
        token_row = np.repeat(inputs.rows, np.diff(inputs.query_start_loc))
        block, offset = np.divmod(inputs.positions, self._block_size)
        slots = self._table[token_row, block].astype(np.int64) * self._block_size + offset
        table = self._table[inputs.rows, : inputs.block_table.shape[1]]
        return replace(inputs, windows=replace(inputs, slot_mapping=slots, block_table=table))
