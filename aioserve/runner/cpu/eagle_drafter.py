"""Guesses by an EAGLE-3 head, from states of the model that it is for.

What the head reads at a place is the token there and the state of the token before, so its K and V
of a place lie in the slot of the place before. States of all tokens are kept, for whoever catches
up. Knows rows and slots; the rest is `ModelDrafter`'s.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aioserve.runner.attention.backend import IntArray, ModelInputs, StepInputs
from aioserve.runner.cpu.attention import AttentionBackend
from aioserve.runner.cpu.draft_model import ModelDrafter
from aioserve.runner.cpu.eagle import NUM_TAPS, EagleHead
from aioserve.runner.draft_length import ModelDraftLength
from aioserve.runner.drafter import Texts
from aioserve.runner.served_model import Taps


class EagleDrafter(ModelDrafter):
    """Reads again, with the model's own states, what it has guessed and was right."""

    num_skipped = 1  # the first token has none before it

    def __init__(
        self,
        head: EagleHead,
        taps: Taps,
        backend: AttentionBackend,
        length: ModelDraftLength,
        **limits: int,
    ) -> None:
        """`taps` tell of three layers. `limits`: as `ModelDrafter` takes them."""
        super().__init__(backend, length, **limits)
        self._head = head
        self._taps = taps
        num_slots = backend.memory.num_blocks * self._block_size
        width = NUM_TAPS * head.target_size
        # Of every slot. Pages that were never written are no memory.
        self._states = torch.empty(num_slots, width, dtype=head.kv_cache_spec.dtype)
        self._own: dict[int, Tensor] = {}  # by row, the state behind its last guess

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        del token_ids
        self._guessed.pop(row, None)

    def guesses(
        self, rows: Sequence[int], others: Sequence[int], inputs: StepInputs, texts: Texts
    ) -> dict[int, list[int]]:
        states = self._taps.states().transpose(0, 1).flatten(1)  # [T, 3 * hidden]
        self._states[torch.from_numpy(inputs.slot_mapping)] = states
        self._own.clear()
        return super().guesses(rows, others, inputs, texts)

    def _compute(
        self, rows: IntArray, begins: IntArray, ends: IntArray, sampling: IntArray, texts: Texts
    ) -> Tensor:
        token_ids = texts.pack(rows, begins, ends).input_ids
        packed = texts.pack(rows, begins - 1, ends - 1)
        self._prepare(packed)
        inputs = ModelInputs.of(packed)
        if self._own:  # behind what the model has computed
            states = torch.stack([self._own[row] for row in rows.tolist()])
        else:
            states = self._head.combine(self._states[inputs.slots])
        states = self._head.forward(
            torch.from_numpy(token_ids), inputs.positions, states, self._backend
        )
        last = states[torch.from_numpy(packed.query_start_loc[1:][sampling] - 1)]
        self._own = dict(zip(rows[sampling].tolist(), last, strict=True))
        return self._head.logits(last)
