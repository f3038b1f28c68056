"""Who guesses what comes next: the seam between the persistent batch and the ways of guessing.

Knows rows and token ids. Knows nothing about how guesses are verified.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.draft_length import DraftLength
from aioserve.runner.grammar_rows import GrammarRows
from aioserve.runner.sampling_columns import SamplingInputs
from aioserve.scheduler.output import NewRequestData


class Texts(Protocol):
    """What a drafter may ask of the batch: the texts of its rows, and where their blocks lie."""

    grammar_rows: GrammarRows

    def num_tokens(self, rows: Sequence[int] | IntArray) -> IntArray:
        """How many tokens are known of each of `rows`."""

    def num_slots(self, rows: Sequence[int]) -> IntArray:
        """How many tokens the blocks of each of `rows` can hold."""

    def blocks(self, row: int) -> npt.NDArray[np.int32]:
        """The blocks of a row, in the order of its tokens; int32."""

    def write(self, row: int, place: int, token_id: int) -> None:
        """Put a guess behind the known tokens of a row."""

    def pack(self, rows: IntArray, begins: IntArray, ends: IntArray) -> StepInputs:
        """The tokens from `begins` to `ends` of R `rows` as a step in which none samples."""

    def sampling_of(self, rows: IntArray, num_tokens: IntArray) -> SamplingInputs:
        """How `rows` would be sampled if so many tokens were known of them."""


class Drafter(ABC):
    """Told of each row what it says, and asked for `guesses`; `length` says how many pay."""

    length: DraftLength

    @abstractmethod
    def set(self, row: int, request: NewRequestData) -> None:
        """A request enters."""

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
