"""The seam between the batch and a feature that keeps something of its rows between two steps.

`batch_parts` registers the parts; `InputBatch` calls them and knows none of them by name. While
`rows` is empty, a step calls nothing of the part. Knows rows, requests and steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.scheduler.output import NewRequestData, SchedulerOutput

T = TypeVar("T")


class BatchPart(ABC, Generic[T]):
    """What one feature keeps of the rows whose requests ask for it.

    A method that raises in `set` fails the request alone; one that raises in `prepare` fails the
    step, which may be prepared again. `append` does not raise: a row that cannot go on is noted in
    `errors`.
    """

    #: The key under which `prepare` leaves a result in `StepInputs.parts`, if it has one.
    name = ""
    #: The field of `NewRequestData` by which a request asks for the part, with dots between names;
    #: "" if each request has it. `set` is called where the field is neither None nor empty.
    asked_by = ""

    def __init__(self) -> None:
        self.rows: dict[int, T] = {}
        self.errors: dict[int, str] = {}  # by row, why its request cannot go on

    @abstractmethod
    def set(self, row: int, request: NewRequestData) -> None:
        """A request that asks for the part enters the row, which is added to `rows` if there is
        anything to do for it.
        """

    def drop(self, row: int, *, is_finished: bool = False) -> None:
        """The request leaves a row of `rows`; `is_finished`: it has all the tokens that it will."""
        del is_finished
        self.rows.pop(row, None)
        self.errors.pop(row, None)

    def extend(self, row: int, block_ids: Sequence[int]) -> None:
        """A row gets more blocks of the KV cache, and overwrites what they held."""

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        """The inputs of a step with what this part adds to them. A step may be prepared again."""
        del step
        return inputs

    def append(
        self, rows: IntArray, token_ids: list[list[int]], drafts: Mapping[int, Sequence[int]]
    ) -> None:
        """Note the tokens that are kept of each of `rows`, some of which had `drafts`."""

    def may_cut(self, row: int) -> bool:
        """Whether the tokens of a row in a step can be computed a part at a time."""
        del row
        return True

    def close(self) -> None:
        """Give back what the part holds besides memory. Idempotent."""
