"""Whose prompts become vectors, and what was added up of them so far, by row of the batch.

A prompt may come in any pieces. Knows rows, positions and hidden states; knows nothing about where
these come from.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.outputs import Vector
from aioserve.params import PoolingParams
from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.batch.batch_part import BatchPart
from aioserve.scheduler.output import NewRequestData, SchedulerOutput


@dataclass(slots=True, eq=False)
class _Prompt:
    """One that is not computed to its end yet."""

    request_id: str
    num_tokens: int
    params: PoolingParams
    total: Tensor | None = None  # float32 [hidden], of the states so far, where all count

    def add(self, states: Tensor) -> None:
        """The next [N, hidden] of its states."""
        own = states.sum(dim=0, dtype=torch.float32)
        self.total = own if self.total is None else self.total + own

    def vector(self) -> Vector:
        """The vector for the caller; all states are there."""
        assert self.total is not None
        vector = self.total
        if self.params.pooling == "mean":
            vector = vector / self.num_tokens
        if self.params.dimensions is not None:
            vector = vector[: self.params.dimensions]
        if self.params.normalize:
            vector = F.normalize(vector, dim=0)
        found: Vector = vector.numpy()
        return found


@dataclass(frozen=True, slots=True)
class WantedStates:
    """The N packed tokens of one step whose hidden states are pooled."""

    places: IntArray  # N, ascending: none of them samples
    _parts: list[tuple[_Prompt, int, bool]]  # whose they are, how many, whether that is all

    def keep(self, states: Tensor) -> dict[str, Vector]:
        """Add up the states [N, hidden]; returns the vectors of complete prompts, by request.

        To be called in the order of the steps, whatever was dropped or set meanwhile.
        """
        complete, begin = {}, 0
        for prompt, count, is_last in self._parts:
            prompt.add(states[begin : begin + count])
            begin += count
            if is_last:
                complete[prompt.request_id] = prompt.vector()
        return complete


class PooledRows(BatchPart[_Prompt]):
    """Prompts by row, none of which samples; what a step pools of them is `WantedStates`, if it is
    anything.
    """

    name = "pooling"
    asked_by = "pooling_params"

    def set(self, row: int, request: NewRequestData) -> None:
        params = request.pooling_params
        assert params is not None, "`asked_by`"
        self.rows[row] = _Prompt(request.request_id, request.num_prompt_tokens, params)

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        del step
        places, parts = [], []
        for index, row in enumerate(inputs.rows.tolist()):
            prompt = self.rows.get(row)
            if prompt is None:
                continue
            begin, end = inputs.query_start_loc[index : index + 2].tolist()
            is_last = int(inputs.seq_lens[index]) == prompt.num_tokens
            if prompt.params.pooling != "mean":
                begin = end - 1 if is_last else end
            if begin < end:
                places.append(np.arange(begin, end))
                parts.append((prompt, end - begin, is_last))
        if parts:
            inputs.parts[self.name] = WantedStates(np.concatenate(places), parts)
        samples = np.isin(inputs.rows[inputs.sampling], list(self.rows), invert=True)
        return replace(
            inputs,
            sampling=inputs.sampling[samples],
            logits_indices=inputs.logits_indices[samples],
        )
