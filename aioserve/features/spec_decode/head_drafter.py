"""Guesses by an EAGLE-3 head or an MTP layer, from states of the model that it is for.

Begins with what such heads have in common. Knows tensors and attention; knows nothing about
requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from aioserve.features.spec_decode.draft_length import ModelDraftLength
from aioserve.features.spec_decode.model_drafter import Draft, DraftRunner, Forward, ModelDrafter
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import (
    AttentionCall,
    IntArray,
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    StepInputs,
)
from aioserve.runner.batch.drafter import Texts
from aioserve.runner.served_model import ServedModel, Taps


class DraftHead(ABC):
    """A few layers that go on from what the served model thought of its tokens."""

    kv_cache_spec: KVCacheSpec
    attention_calls: tuple[AttentionCall, ...]
    device: torch.device
    num_parameters: int
    state_size: int  # numbers that it reads of the served model for each token

    @abstractmethod
    def combine(self, states: Tensor) -> Tensor:
        """Return one state [T, hidden] of what the served model gave, [T, `state_size`]."""

    @abstractmethod
    def forward(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, attention: LayerAttention
    ) -> Tensor:
        """Return the states [T, hidden] that continue `states` [T, hidden] with `token_ids` [T],
        each the one after its state's own. `attention` is that of the step, on the cache of this
        head.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Logits [N, V] of any of those states."""


# Guesses by an EAGLE-3 head or an MTP layer, from states of the model that it is for. What the head
# reads at a place is the token there and the state of the token before, so its K and V of a place
# lie in the slot of the place before. States of all tokens are kept, for rows that catch up. Knows
# rows and slots; the rest is `ModelDrafter`'s.


class HeadDrafter(ModelDrafter):
    """Reads again, with the model's own states, what it has guessed and was right."""

    num_skipped = 1  # the first token has none before it

    def __init__(
        self,
        head: DraftHead,
        taps: Taps,
        runner: DraftRunner,
        length: ModelDraftLength,
        **limits: int,
    ) -> None:
        """`taps` tell of what `head` reads. `limits`: as `ModelDrafter` takes them."""
        super().__init__(runner, length, **limits)
        self._head = head
        # Of every slot. On a CPU, pages that were never written are no memory.
        shape, dtype = (runner.num_slots, head.state_size), head.kv_cache_spec.dtype
        self._states = torch.empty(shape, dtype=dtype, device=head.device)
        if self.kept:  # the head reads them where it goes on, or has not read a block yet
            self.kept = (*self.kept, self._states.view(runner.num_blocks, -1))
        self._own: dict[int, Tensor] = {}  # by row, the state behind its last guess
        taps.keep = self._keep

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        del token_ids
        self._guessed.pop(row, None)

    def guesses(
        self, rows: Sequence[int], others: Sequence[int], inputs: StepInputs, texts: Texts
    ) -> dict[int, list[int]]:
        self._own.clear()
        return super().guesses(rows, others, inputs, texts)

    def _keep(self, slots: Tensor, states: Tensor) -> None:
        """Keep hidden states, as `Taps.keep`; it may be recorded in a CUDA graph."""
        self._states.index_copy_(0, slots, states.transpose(0, 1).flatten(1))

    def _pack(self, rows: IntArray, begins: IntArray, ends: IntArray, texts: Texts) -> StepInputs:
        token_ids = texts.batch.pack(rows, begins, ends).input_ids
        return replace(texts.batch.pack(rows, begins - 1, ends - 1), input_ids=token_ids)

    def _forward(self, rows: IntArray, sampling: IntArray) -> Forward:
        before = [self._own[row] for row in rows.tolist()] if self._own else []
        asking = rows[sampling].tolist()

        def forward(inputs: ModelInputs, attention: LayerAttention) -> Tensor:
            if before:  # behind what the model has computed
                states = torch.stack(before)
            else:
                states = self._head.combine(self._states[inputs.slots])
            states = self._head.forward(inputs.input_ids, inputs.positions, states, attention)
            last = states[inputs.logits_rows]
            self._own = dict(zip(asking, last, strict=True))
            return self._head.logits(last)

        return forward


def draft_of_head(info: ModelInfo, head: DraftHead, taps: Taps, target: ServedModel) -> Draft:
    """Return a `head` that is loaded, in the directory of `info`, which `taps` of `target` tell."""
    spec, device = head.kv_cache_spec, head.device

    def forward(inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        shape = (len(inputs.slots), head.state_size)
        states = head.combine(torch.zeros(shape, dtype=spec.dtype, device=device))
        states = head.forward(inputs.input_ids, inputs.positions, states, attention)
        return head.logits(states[inputs.logits_rows])

    make, size = partial(HeadDrafter, head, taps), head.state_size * spec.dtype.itemsize
    return Draft(info, target, spec, head.attention_calls, size, forward, make)
