"""Drafters guess what comes next: the seam between the persistent batch and ways of guessing.

Then the part of the batch that guesses: by a drafter, or where a grammar leaves no choice. Knows
rows and token ids. Knows nothing about how guesses are verified.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from aioserve.features.spec_decode.draft_length import DraftLength
from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.batch.input_batch import BatchPart, InputBatch
from aioserve.runner.batch.masks import BoundRows
from aioserve.runner.batch.sampling_columns import SamplingColumns
from aioserve.scheduler.output import NewRequestData, SchedulerOutput


class Texts(NamedTuple):
    """The texts of rows, the places of their blocks, and how they go on: what a drafter may ask."""

    batch: InputBatch
    grammars: BoundRows
    sampling: SamplingColumns


class Drafter(ABC):
    """Told of each row what it says, and asked for `guesses`; `length` says how many pay."""

    length: DraftLength
    #: What it knows of each KV block, [num_blocks, ...]: goes where the block goes.
    kept: Sequence[Tensor] = ()

    @abstractmethod
    def set(self, row: int, request: NewRequestData) -> None:
        """Add a request to the batch."""

    def take_blocks(self, block_ids: Sequence[int]) -> None:
        """A row has got these blocks, and overwrites what they held."""
        del block_ids

    @abstractmethod
    def append(self, row: int, token_ids: Sequence[int]) -> None:
        """A row has said so much more."""

    @abstractmethod
    def drop(self, row: int, *, is_finished: bool) -> None:
        """Forget a row; `is_finished`: it has said all that it will."""

    @abstractmethod
    def guesses(
        self, rows: Sequence[int], others: Sequence[int], inputs: StepInputs, texts: Texts
    ) -> dict[int, list[int]]:
        """What may come next of some of `rows`, each of which has sampled in the step of `inputs`.

        `others` are the rest of its rows that may ask later.
        """

    def close(self) -> None:  # noqa: B027
        """Give back what it holds, if that is anything. Idempotent."""


# The part of the batch that guesses tokens: by a drafter, or where a grammar leaves no choice.
# Knows which guesses are whose; knows nothing about how a drafter makes them.


logger = logging.getLogger(__name__)


class DraftRows(BatchPart[bool]):
    """The rows that a drafter is told of, if there is one; by row, whether it is ever to guess."""

    name = "draft_lengths"

    def __init__(
        self, drafter: Drafter | None, sampling: SamplingColumns, grammars: BoundRows
    ) -> None:
        super().__init__()
        self.drafter, self._sampling, self._grammars = drafter, sampling, grammars
        self._guessed: set[int] = set()  # rows whose drafts are the drafter's

    def set(self, row: int, request: NewRequestData) -> None:
        if self.drafter is not None:
            self.rows[row] = request.pooling_params is None
            self.drafter.set(row, request)

    def drop(self, row: int, *, is_finished: bool = False) -> None:
        super().drop(row)
        self._guessed.discard(row)
        if self.drafter is not None:
            self.drafter.drop(row, is_finished=is_finished)

    def extend(self, row: int, block_ids: Sequence[int]) -> None:
        if self.drafter is not None:
            self.drafter.take_blocks(block_ids)

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        if asked := step.draft_lengths:
            rows = zip(inputs.req_ids, inputs.rows.tolist(), strict=True)
            inputs.parts[self.name] = {row: asked[own] for own, row in rows if own in asked}
        return inputs

    def append(
        self, rows: IntArray, token_ids: list[list[int]], drafts: Mapping[int, Sequence[int]]
    ) -> None:
        if self.drafter is None:
            return
        for row, own in zip(rows.tolist(), token_ids, strict=True):
            if own:
                self.drafter.append(row, own)
            if row in self._guessed:
                self._guessed.remove(row)
                if row in drafts:  # the policy may have sent none of them
                    self.drafter.length.verified(row, len(drafts[row]), len(own) - 1)

    def guesses(self, inputs: StepInputs, batch: InputBatch) -> dict[str, list[int]]:
        """What comes next of the requests of a step, where their grammars leave no choice, or where
        the drafter has a guess.
        """
        found: dict[int, list[int]] = {}
        waiting, sampled = [], set(inputs.sampling.tolist())
        others = []  # rows that ask in a later step
        for index, row in enumerate(inputs.rows.tolist()):
            if self._sampling.counts_tokens(row) or not self.rows.get(row, True):
                continue  # penalties count every token before the next: drafts would come too early
            if index not in sampled or self._grammars.is_slow(row):
                others.append(row)
            elif token_ids := self._grammars.guesses(row):
                found[row] = token_ids
                others.append(row)
            else:
                waiting.append(row)
        if self.drafter is not None:
            texts = Texts(batch, self._grammars, self._sampling)
            self.drafter.length.asked = inputs.parts.get(self.name, {})
            try:
                guesses = self.drafter.guesses(waiting, others, inputs, texts)
            except Exception:  # what follows is computed without
                logger.exception("no tokens could be guessed")
                self._grammars.come_back()
                guesses = {}
            self._guessed.update(guesses)
            found |= guesses
        return {
            req_id: found[row]
            for req_id, row in zip(inputs.req_ids, inputs.rows.tolist(), strict=True)
            if row in found
        }

    def close(self) -> None:
        if self.drafter is not None:
            self.drafter.close()
