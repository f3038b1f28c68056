"""Which tokens the rows of a step may take: the seam between the batch and what binds its texts.

A grammar or a thinking budget binds the text of a row. The part of the batch that holds such rows
says before a step which tokens may come next, and guesses where there is no choice. Knows rows and
token ids; knows nothing about what binds them.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.batch.input_batch import BatchPart

if TYPE_CHECKING:
    from torch import Tensor

Words = npt.NDArray[np.int32]
_NO_PLACES: IntArray = np.zeros(0, dtype=np.int64)
NO_DRAFTS: Mapping[int, Sequence[int]] = {}


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that M of the S rows of a step may take."""

    places: IntArray  # M, among the S
    words: Words  # [M, ceil(V / 32)], a bit per token, the lowest first
    late: IntArray = field(default_factory=lambda: _NO_PLACES)  # among the S: they sit out

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Return the masks as booleans [M, V]: True for each token id that may come next."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def of(self, place: int) -> "Masks | None":
        """That of one of the S, as the only one of a step; None if it may take all tokens."""
        own = np.flatnonzero(self.places == place)
        return Masks(np.zeros(1, dtype=np.int64), self.words[own[:1]]) if len(own) else None


def leave_out_late(
    inputs: StepInputs, logits: "Tensor", masks: Masks
) -> tuple[StepInputs, "Tensor", Masks, list[str]]:
    """Return a step, its logits [S, V] and masks without the rows that sit it out, and their
    requests.
    """
    import torch

    kept = np.delete(np.arange(len(inputs.sampling)), masks.late)
    indices = set(inputs.sampling[masks.late].tolist())
    rows = {int(inputs.rows[index]) for index in indices}
    left = replace(
        inputs,
        sampling=inputs.sampling[kept],
        logits_indices=inputs.logits_indices[kept],
        drafts={row: own for row, own in inputs.drafts.items() if row not in rows},
    )
    places = np.searchsorted(kept, masks.places)
    return (
        left,
        logits[torch.from_numpy(kept)],
        replace(masks, places=places, late=masks.late[:0]),
        [inputs.req_ids[index] for index in sorted(indices)],
    )


class StepMasks(Protocol):
    """The masks of one step, while they are made."""

    def take(self, rows: IntArray, *, may_sit_out: bool) -> Masks:
        """Return those of the S `rows` of the step, once its forward pass is done. If they
        `may_sit_out`, some may be late; else the rows whose masks are not there after a second
        fail.
        """


class Standing(NamedTuple):
    """A row that samples and has a matcher: what follows its text."""

    place: int  # among the S
    row: int
    matcher: Any
    is_bound: bool  # it needs a mask in this step


class BoundRows(BatchPart[Any]):
    """The rows whose texts are bound. What `begin` returns is taken before `append`, `set` or
    `drop`.
    """

    @abstractmethod
    def begin(self, rows: IntArray, drafts: Mapping[int, Sequence[int]]) -> StepMasks | None:
        """Start the masks of the S `rows`; None if none of them is bound.

        A row stands there once, and once more for each of its `drafts`, one after the other.
        """

    @abstractmethod
    def standing(
        self, rows: IntArray, drafts: Mapping[int, Sequence[int]] = NO_DRAFTS
    ) -> list[Standing]:
        """Return which of the S `rows` have a matcher: for `catch_up`, when their tokens
        are known.
        """

    @abstractmethod
    def catch_up(self, standing: Sequence[Standing], token_ids: Words) -> None:
        """Go on by the sampled tokens [S], unless another request has the row by now."""

    # For drafts.

    @abstractmethod
    def is_slow(self, row: int) -> bool:
        """Return whether calls for a row take long: then nothing is asked of it but its masks."""

    @abstractmethod
    def guesses(self, row: int) -> list[int]:
        """Return the next tokens of a row, as far as there is no choice of text."""

    @abstractmethod
    def masks(self, rows: IntArray) -> Masks | None:
        """Return the tokens that each of M `rows` may say next; None if none of them is bound."""

    @abstractmethod
    def go_ahead(self, row: int, token_id: int) -> bool:
        """Take a guess as said until `come_back`; False if nothing can follow it."""

    @abstractmethod
    def come_back(self) -> None:
        """Roll all rows back to before the draft tokens."""
