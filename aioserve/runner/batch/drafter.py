"""Drafters guess what comes next: the seam between the persistent batch and ways of guessing.

Then the part of the batch that guesses: by a drafter, or where a grammar leaves no choice. Knows
rows and token ids. Knows nothing about how guesses are verified.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from aioserve.config import EngineConfig, ModelConfig
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import (
    IntArray,
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    StepInputs,
)
from aioserve.runner.batch.input_batch import BatchPart, InputBatch
from aioserve.runner.batch.masks import BoundRows
from aioserve.runner.batch.sampling_columns import SamplingColumns
from aioserve.runner.served_model import ServedModel
from aioserve.scheduler.output import NewRequestData, SchedulerOutput
from aioserve.support.parts import Brought


class Texts(NamedTuple):
    """The texts of rows, the places of their blocks, and how they go on: what a drafter may ask."""

    batch: InputBatch
    grammars: BoundRows | None  # None: no row has one
    sampling: SamplingColumns


class DraftLengths(Protocol):
    """The number of draft tokens that pay, learned from what each step cost and from each draft
    that was verified.
    """

    max_tokens: int
    #: By request, what the policy asks for after this step, whether it pays or not.
    asked: Mapping[Any, int]

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step is done; the next one may have as many rows."""

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        """Record how many draft tokens were sent and accepted."""

    def limits(self, requests: Mapping[Any, Any]) -> dict[Any, int]:
        """Return how many draft tokens of `requests` are worth sending now, all that are `asked`
        for among them. `requests` says of each what a way of drafting knows of it.
        """

    def forget(self, request: Hashable) -> None:
        """Drop the record of a request that has left, or whose id is reused."""

    def forget_times(self) -> None:
        """Forget measured times: the steps so far were none like those that come."""


class Drafter(ABC):
    """A drafter, which is told what each row says and asked for `guesses`; `length` says how many
    pay.
    """

    length: DraftLengths

    #: Whether `guesses` reads no `inputs`, whose arrays the next step may then overwrite.
    reads_texts_alone: bool = False
    #: What it has of each KV block, [num_blocks, ...], beside the KV cache: goes where the block
    #: goes.
    kept: Sequence[Tensor] = ()
    #: The same, on the host: one number of a byte for each KV block, uint8 [num_blocks, 1].
    noted: Tensor | None = None

    @abstractmethod
    def set(self, row: int, request: NewRequestData) -> None:
        """Add a request to the batch."""

    def take_blocks(self, block_ids: Sequence[int]) -> None:
        """A row has got these blocks, and overwrites what they held."""
        del block_ids

    @abstractmethod
    def append(self, row: int, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of a row."""

    def append_all(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Take in the next tokens of all `rows` of a step, perhaps none of some."""
        for row, own in zip(rows, token_ids, strict=True):
            if own:
                self.append(row, own)

    @abstractmethod
    def drop(self, row: int, *, is_finished: bool) -> None:
        """Forget a row; `is_finished`: it has said all that it will."""

    @abstractmethod
    def guesses(
        self, rows: Sequence[int], others: Sequence[int], inputs: StepInputs, texts: Texts
    ) -> dict[int, list[int]]:
        """Return what may come next of some of `rows`, each of which has sampled in the step of
        `inputs`.

        `others` are the rest of its rows that may ask later.
        """

    def rests(self) -> bool:
        """Return whether it has no guess after this step, whatever rows there are. To be asked once
        a step, when `length` has been told of it.
        """
        return False

    def close(self) -> None:  # noqa: B027
        """Give back what it holds, if that is anything. Idempotent."""


# Models that guess, before they are loaded and after: what a side asks of the part that has them.


class DraftPlace(NamedTuple):
    """The side on which a drafter is loaded: how models and products get there."""

    load: Callable[[ModelInfo], ServedModel]
    linear: Callable[[Tensor], Callable[[Tensor], Tensor]]  # the product with a weight
    device: torch.device
    keep_latents: Callable[[torch.nn.Module], int] = lambda _: 0  # as `Place` has it


class FoundDraft(Protocol):
    """A draft model that was found on disk, before weights are read."""

    has_files: bool  # whether its weights lie apart from those of the served model
    num_states: int  # numbers of the served model's states that are kept for each of its tokens
    info: ModelInfo  # of the model in whose directory it lies
    config: ModelConfig

    @property
    def hf_config(self) -> Any:
        """The configuration of the layers that draft."""


class LoadedDraft(Protocol):
    """A drafter that is loaded; its KV cache is not made yet."""

    @property
    def target(self) -> ServedModel:
        """The served model, as it is to be run while this drafts for it."""

    @property
    def kv_cache_spec(self) -> KVCacheSpec: ...

    @property
    def state_bytes(self) -> int:
        """Bytes for each token of the served model, besides K and V."""

    @property
    def forward(self) -> Callable[[ModelInputs, LayerAttention], Tensor]:
        """A pass of the draft model: to see what it takes."""

    def make_drafter(self, config: EngineConfig, runner: Any) -> Drafter:
        """`runner`: the passes on one side, with a KV cache for `kv_cache_spec`."""


#: What parts bring to guess tokens: `length` makes `DraftLengths`, `ngram` a drafter of settings,
#: `find` a `FoundDraft` of settings, `load` a `LoadedDraft` of that; `cpu passes` runs one on a
#: CPU.
DRAFTERS = Brought[Any]("drafters")


# The part of the batch that guesses tokens: by a drafter, or where a grammar leaves no choice.
# Knows which guesses are whose; knows nothing about how a drafter makes them.


logger = logging.getLogger(__name__)


class DraftRows(BatchPart[bool]):
    """The rows that a drafter is told of, if there is one; by row, whether it is ever to guess."""

    name = "draft_lengths"

    def __init__(
        self,
        drafter: Drafter | None,
        sampling: SamplingColumns,
        grammars: Callable[[], BoundRows | None],
        most_with_drafts: float = math.inf,
    ) -> None:
        """`grammars` returns None while no row has one. With guesses of `drafter` a step of as many
        rows as the last one has fewer than `most_with_drafts` tokens, or as many without them.
        """
        super().__init__()
        self.drafter, self._sampling, self._grammars = drafter, sampling, grammars
        self._most = most_with_drafts
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

    def keeps_inputs(self, step: SchedulerOutput) -> bool:
        reads_arrays = self.drafter is not None and not self.drafter.reads_texts_alone
        return not step.draft_lengths and not reads_arrays

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
        places = rows.tolist()
        self.drafter.append_all(places, token_ids)
        for row, own in zip(places, token_ids, strict=True) if self._guessed else ():
            if row in self._guessed:
                self._guessed.remove(row)
                if row in drafts:  # the policy may have sent none of them
                    self.drafter.length.verified(row, len(drafts[row]), len(own) - 1)

    def learn(self, inputs: StepInputs, seconds: float) -> None:
        """Let the drafter learn what the step of `inputs` took. What it raises ends no request."""
        if self.drafter is None:
            return
        length = self.drafter.length
        try:
            length.stepped(len(inputs.req_ids), len(inputs.positions), seconds)
        except Exception:
            logger.exception("what drafts cost could not be learned: it is learned anew")
            length.forget_times()

    def guesses(self, inputs: StepInputs, batch: InputBatch) -> dict[str, list[int]]:
        """Return what comes next of the requests of a step, where their grammars leave no choice,
        or where the drafter has a guess.
        """
        found: dict[int, list[int]] = {}
        drafter, grammars = self.drafter, self._grammars()
        if drafter is not None:
            drafter.length.asked = inputs.parts.get(self.name, {})
            if drafter.rests():
                if grammars is None:
                    return {}
                drafter = None
        waiting, sampled = [], set(inputs.sampling.tolist())
        others = []  # rows that ask in a later step
        for index, row in enumerate(inputs.rows.tolist()):
            if self._sampling.counts_tokens(row) or not self.rows.get(row, True):
                continue  # penalties count every token before the next: drafts would come too early
            if index not in sampled or (grammars is not None and grammars.is_slow(row)):
                others.append(row)
            elif grammars is not None and (token_ids := grammars.guesses(row)):
                found[row] = token_ids
                others.append(row)
            else:
                waiting.append(row)
        if drafter is not None:
            texts = Texts(batch, grammars, self._sampling)
            try:
                guesses = drafter.guesses(waiting, others, inputs, texts)
            except Exception:  # what follows is computed without
                logger.exception("no tokens could be guessed")
                if grammars is not None:
                    grammars.come_back()
                guesses = {}
            size = len(inputs.rows) + sum(map(len, found.values()))
            if size < self._most < math.inf:
                guesses = _shortened(guesses, int(self._most) - 1 - size)
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


def _shortened(guesses: Mapping[int, list[int]], most: int) -> dict[int, list[int]]:
    """Return `most` tokens of the guesses in all: of each row about as many as of the next."""
    found: dict[int, list[int]] = {}
    for done, (row, token_ids) in enumerate(sorted(guesses.items(), key=lambda it: len(it[1]))):
        share = most // (len(guesses) - done)
        if own := token_ids[:share]:
            found[row] = own
        most -= len(own)
    return found
