"""Whose prompts are looked at, and what was found of them so far, by row of the batch.

How likely their own tokens are, and vectors of them. A prompt may come in any pieces. Knows rows
and positions; knows nothing about how logits are computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.outputs import TokenLogprobs, Vector
from aioserve.params import PoolingParams
from aioserve.runner.attention.backend import POOLED, PROMPT_LOGPROBS, IntArray, StepInputs
from aioserve.runner.batch.input_batch import BatchPart
from aioserve.runner.interface import NOT_FINITE
from aioserve.scheduler.output import NewRequestData, SchedulerOutput

# Logits that are made at a time for prompts: 32 MiB in float32, however long the prompts are.
PIECE_ELEMENTS = 1 << 23


def largest_piece(vocab_size: int) -> int:
    """Return how many tokens' logits are made at a time."""
    return max(1, PIECE_ELEMENTS // vocab_size)


@dataclass(slots=True, eq=False)
class _Prompt:
    """One that is not computed to its end yet."""

    request_id: str
    token_ids: IntArray
    num_logprobs: int
    found: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """The prompt log probabilities that one step can tell, at N of its packed tokens."""

    places: IntArray  # N, ascending: none of them samples
    token_ids: IntArray  # N, of the prompt, each after the one at its place
    num_logprobs: list[int]  # N, alternatives
    #: Whose they are, behind how many, how many, whether that is all.
    _parts: list[tuple[_Prompt, int, int, bool]]

    def pieces(self, vocab_size: int) -> list[slice]:
        """Return the N in pieces whose logits fit into memory together."""
        size, count = largest_piece(vocab_size), len(self.places)
        return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def keep(self, found: Sequence[TokenLogprobs]) -> dict[str, list[TokenLogprobs]]:
        """Note what was found at the N; returns those of prompts that are complete, by request.

        To be called in the order of the steps, whatever was dropped or set meanwhile.
        """
        complete, begin = {}, 0
        for prompt, place, count, is_last in self._parts:
            prompt.found[place:] = found[begin : begin + count]
            begin += count
            if is_last:
                complete[prompt.request_id] = prompt.found
        return complete


class PromptRows(BatchPart[_Prompt]):
    """Prompts by row; what a step can tell of them is `WantedLogprobs`, if it is anything."""

    name = PROMPT_LOGPROBS
    asked_by = "sampling_params.prompt_logprobs"

    def set(self, row: int, request: NewRequestData) -> None:
        # A request that has an output was told already.
        count, num_prompt = request.sampling_params.prompt_logprobs, request.num_prompt_tokens
        if count is not None and len(request.token_ids) == num_prompt:
            token_ids = np.array(request.token_ids, dtype=np.int64)
            self.rows[row] = _Prompt(request.request_id, token_ids, count)

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        del step
        places, token_ids, num_logprobs, parts = [], [], [], []
        for index, row in enumerate(inputs.rows.tolist()):
            prompt = self.rows.get(row)
            if prompt is None:
                continue
            begin, end = inputs.query_start_loc[index : index + 2].tolist()
            following = inputs.positions[begin:end] + 1
            place = int(following[0]) - 1  # of what is found among all of the prompt
            if place >= len(prompt.token_ids):  # it was complete with the last step
                self.drop(row)
                continue
            is_last = bool(following[-1] >= len(prompt.token_ids))
            if is_last:  # what follows it is sampled
                following = following[following < len(prompt.token_ids)]
            places.append(np.arange(begin, begin + len(following)))
            token_ids.append(prompt.token_ids[following])
            num_logprobs += [prompt.num_logprobs] * len(following)
            parts.append((prompt, place, len(following), is_last))
        if parts:
            inputs.parts[self.name] = WantedLogprobs(
                np.concatenate(places), np.concatenate(token_ids), num_logprobs, parts
            )
        return inputs


# Whose prompts become vectors, and what was added up of them so far, by row of the batch. A prompt
# may come in any pieces. Knows rows, positions and hidden states; knows nothing about where these
# come from.


@dataclass(slots=True, eq=False)
class _PooledPrompt:
    """One that is not computed to its end yet."""

    request_id: str
    num_tokens: int
    params: PoolingParams
    total: Tensor | None = None  # float32 [hidden], of the states so far, where all count

    def add(self, total: Tensor) -> None:
        """Add the sum of the next states of the prompt, float32 [hidden]. Keeps nothing of the
        memory of `total`, which is a row among those of other prompts.
        """
        self.total = total.clone() if self.total is None else self.total + total

    def vector(self) -> Vector:
        """Return the vector for the caller; all states are there."""
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
    _parts: list[tuple[_PooledPrompt, int, bool]]  # whose they are, how many, whether that is all

    @property
    def num_prompts(self) -> int:
        """P: how many prompts these tokens are of."""
        return len(self._parts)

    def totals(self, states: Tensor) -> Tensor:
        """Return the sum of each prompt's own of the states [N, hidden]: float32 [P, hidden]."""
        ends = np.cumsum([count for _, count, _ in self._parts])[:-1].tolist()
        parts = torch.tensor_split(states, ends)
        return torch.stack([own.sum(dim=0, dtype=torch.float32) for own in parts])

    def keep(self, totals: Tensor, failed: dict[str, str]) -> dict[str, Vector]:
        """Add up the `totals`, on the host; returns the vectors of complete prompts, by request.
        Those that are no numbers are among what has `failed` instead.

        To be called in the order of the steps, whatever was dropped or set meanwhile.
        """
        complete = {}
        for (prompt, _, is_last), total in zip(self._parts, totals, strict=True):
            prompt.add(total)
            if is_last:
                vector = prompt.vector()
                if np.isfinite(vector).all():
                    complete[prompt.request_id] = vector
                else:
                    failed[prompt.request_id] = NOT_FINITE
        return complete


class PooledRows(BatchPart[_PooledPrompt]):
    """Prompts by row, none of which samples; what a step pools of them is `WantedStates`, if it is
    anything.
    """

    name = POOLED
    asked_by = "pooling_params"

    def set(self, row: int, request: NewRequestData) -> None:
        params = request.pooling_params
        assert params is not None, "`asked_by`"
        self.rows[row] = _PooledPrompt(request.request_id, request.num_prompt_tokens, params)

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
