"""Where a step's rows keep what is beside KV blocks: slots of states, and blocks of windows.

Rows with states are cut at their snapshots, and pieces of one length put together: what a layer is
to compute in one call. Knows rows and slots; knows nothing about models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from aioserve.kv_cache import StatePool, StateSlots, WindowBlocks, WindowPool
from aioserve.runner.attention.backend import IntArray, StatePieces, StepInputs
from aioserve.runner.batch.input_batch import BatchPart
from aioserve.scheduler.output import NewRequestData, SchedulerOutput


class StateRows(BatchPart[None]):
    """The slots of the rows of a batch."""

    def __init__(self, max_num_seqs: int, take_back: Callable[[Mapping[int, int]], None]) -> None:
        """`take_back`: the last tokens of the newest pieces, how many of each by its slot."""
        super().__init__()
        self._take_back = take_back
        self._slots = np.zeros(max_num_seqs, dtype=np.int64)

    def set(self, row: int, request: NewRequestData) -> None:
        self.rows[row] = None  # its slot comes with its first step

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        return replace(inputs, states=self._pieces(inputs, step.parts.get(StatePool.name, {})))

    def append(
        self, rows: IntArray, token_ids: list[list[int]], drafts: Mapping[int, Sequence[int]]
    ) -> None:
        if drafts:
            slots = self._slots[rows].tolist()
            pairs = zip(slots, rows.tolist(), token_ids, strict=True)
            self._take_back(
                {slot: len(drafts[row]) + 1 - len(own) for slot, row, own in pairs if row in drafts}
            )

    def _pieces(self, inputs: StepInputs, told: Mapping[str, StateSlots]) -> list[StatePieces]:
        """Return the pieces of a step, in an order in which each comes after those before it."""
        positions, query_start_loc = inputs.positions, inputs.query_start_loc
        num_tokens = len(positions)
        if not told and num_tokens == len(inputs.rows):  # nothing but decodes: most steps are
            slots = self._slots[inputs.rows]
            return [StatePieces(np.arange(num_tokens)[:, None], slots, slots, _NO_COPIES)]
        groups: dict[tuple[int, int, bool, bool], list[tuple[int, int, int, int]]] = {}
        begins, ends = query_start_loc[:-1].tolist(), query_start_loc[1:].tolist()
        members = zip(inputs.req_ids, inputs.rows.tolist(), begins, ends, strict=True)
        for request_id, row, begin, end in members:
            moves = told.get(request_id)
            if moves is not None:
                self._slots[row] = moves.slot
            slot = int(self._slots[row])
            source, snapshots = (slot, []) if moves is None else (moves.source, moves.snapshots)
            first_position = int(positions[begin])
            cuts = [(begin + position - first_position, copy) for position, copy in snapshots]
            wave = 0
            if not cuts or cuts[-1][0] < end:
                cuts.append((end, -1))
            for cut, copy in cuts:
                # A piece that is not the last leaves its state in the snapshot alone.
                target, copy = (slot, copy) if cut == end else (copy, -1)
                key = (wave, cut - begin, source < 0, row in inputs.drafts)
                groups.setdefault(key, []).append((begin, source, target, copy))
                wave, begin, source = wave + 1, cut, target
        return [
            _together(group, length, is_new, has_drafts)
            for (_, length, is_new, has_drafts), group in sorted(groups.items())
        ]


_NO_COPIES = np.zeros((2, 0), dtype=np.int64)


def _together(
    group: list[tuple[int, int, int, int]], length: int, is_new: bool, has_drafts: bool
) -> StatePieces:
    begins, sources, slots, copies = np.array(group, dtype=np.int64).T
    places = np.flatnonzero(copies >= 0)
    return StatePieces(
        begins[:, None] + np.arange(length),
        None if is_new else sources,
        slots,
        np.stack([places, copies[places]]),
        has_drafts,
    )


# Block tables for layers with a sliding window: where a step's rows keep what those layers see.
# Knows rows and blocks. What fell out of a window stands in a table as it was: no layer reads it.


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
