"""Drafters guess what comes next: the seam between the persistent batch and ways of guessing.

Knows rows and token ids. Knows nothing about how guesses are verified.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.batch.grammar_rows import GrammarRows
from aioserve.runner.batch.input_batch import InputBatch
from aioserve.runner.batch.sampling_columns import SamplingColumns
from aioserve.runner.spec_decode.draft_length import DraftLength
from aioserve.scheduler.output import NewRequestData


class Texts(NamedTuple):
    """The texts of rows, the places of their blocks, and how they go on: what a drafter may ask."""

    batch: InputBatch
    grammars: GrammarRows
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
