"""Where the states of a step's rows are: which slot each begins with, and which it writes.

Cuts rows at their snapshots, and puts pieces of one length together: what a layer is to compute in
one call. Knows rows and slots; knows nothing about models.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioserve.kv_cache import StateSlots

IntArray = npt.NDArray[np.int64]


class StatePieces(NamedTuple):
    """B pieces of L tokens each."""

    tokens: IntArray  # [B, L] packed tokens
    sources: IntArray | None  # B, slots of the states before them; None: they begin texts
    slots: IntArray  # B, where the states behind them go
    copies: IntArray  # [2, C]: those places among B whose states go to these slots as well


class StateRows:
    """The slots of the rows of a batch."""

    def __init__(self, max_num_seqs: int) -> None:
        self._slots = np.zeros(max_num_seqs, dtype=np.int64)

    def pieces(
        self,
        req_ids: Sequence[str],
        rows: IntArray,
        positions: IntArray,
        query_start_loc: IntArray,
        told: Mapping[str, StateSlots],
    ) -> list[StatePieces]:
        """The pieces of a step, in an order in which each comes after those before it; arguments
        are as in `StepInputs` and the part `states` of a `SchedulerOutput`.
        """
        num_tokens = len(positions)
        if not told and num_tokens == len(rows):  # nothing but decodes: most steps are
            slots = self._slots[rows]
            return [StatePieces(np.arange(num_tokens)[:, None], slots, slots, _NO_COPIES)]
        groups: dict[tuple[int, int, bool], list[tuple[int, int, int, int]]] = {}
        begins, ends = query_start_loc[:-1].tolist(), query_start_loc[1:].tolist()
        for request_id, row, begin, end in zip(req_ids, rows.tolist(), begins, ends, strict=True):
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
                key = (wave, cut - begin, source < 0)
                groups.setdefault(key, []).append((begin, source, target, copy))
                wave, begin, source = wave + 1, cut, target
        return [
            _together(group, length, is_new)
            for (_, length, is_new), group in sorted(groups.items())
        ]


_NO_COPIES = np.zeros((2, 0), dtype=np.int64)


def _together(group: list[tuple[int, int, int, int]], length: int, is_new: bool) -> StatePieces:
    begins, sources, slots, copies = np.array(group, dtype=np.int64).T
    places = np.flatnonzero(copies >= 0)
    return StatePieces(
        begins[:, None] + np.arange(length),
        None if is_new else sources,
        slots,
        np.stack([places, copies[places]]),
    )
