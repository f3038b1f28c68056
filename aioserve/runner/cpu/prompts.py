"""A step in which prompts are looked at: how likely their tokens are, and for vectors of them.

Knows a model and numbers; knows nothing about requests.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from aioserve.outputs import TokenLogprobs, Vector
from aioserve.runner.attention.backend import (
    IntArray,
    LayerAttention,
    ModelInputs,
    StepInputs,
)
from aioserve.runner.batch.pooling import WantedStates
from aioserve.runner.batch.prompt_logprobs import WantedLogprobs
from aioserve.runner.cpu.logprobs import token_logprobs
from aioserve.runner.low_rank import AdapterOwners, TokenAdapters
from aioserve.runner.served_model import Halves
from aioserve.runner.unsound import NOT_FINITE


@dataclass(slots=True)
class Looked:
    """Results that a step has found for prompts, and that have not been kept yet."""

    wanted: WantedLogprobs | None
    pooled: WantedStates | None
    states: Tensor | None  # at the places of `pooled`
    found: list[TokenLogprobs] = field(default_factory=list)  # at those of `wanted`

    def keep(
        self, failed: dict[str, str]
    ) -> tuple[dict[str, list[TokenLogprobs]], dict[str, Vector]]:
        """The results that are complete with this step, by request. Vectors that are no numbers are
        among what has `failed` instead.
        """
        told = {} if self.wanted is None else self.wanted.keep(self.found)
        if self.pooled is None or self.states is None:
            return told, {}
        vectors = self.pooled.keep(self.states)
        sound = {key: vector for key, vector in vectors.items() if np.isfinite(vector).all()}
        failed |= dict.fromkeys(vectors.keys() - sound.keys(), NOT_FINITE)
        return told, sound


def forward_and_look(
    model: Halves,
    step: StepInputs,
    owners: AdapterOwners | None,
    attention: LayerAttention,
    wanted: WantedLogprobs | None,
    pooled: WantedStates | None,
) -> tuple[Tensor, Looked]:
    """Logits [S, V] as `ServedModel.forward` gives them, and what is known of what prompts want.

    Their logits are made, looked at and forgotten piece by piece; for vectors none are made.
    `owners`: which adapter each of the tokens of `step` has.
    """

    def adapters_of(places: IntArray) -> TokenAdapters | None:
        return None if owners is None else owners.take(places).on_cpu()

    sampling = step.logits_indices
    parts = [sampling, *(part.places for part in (wanted, pooled) if part is not None)]
    rows = np.sort(np.concatenate(parts))
    inputs = ModelInputs.of(replace(step, logits_indices=rows), owners)
    states = model.hidden(inputs, attention)

    def of(places: IntArray) -> Tensor:
        return states[torch.from_numpy(np.searchsorted(rows, places))]

    def logits_of(places: IntArray) -> Tensor:
        return model.logits(of(places), adapters_of(places))

    looked = Looked(wanted, pooled, None if pooled is None else of(pooled.places))
    logits = logits_of(sampling)
    if wanted is None:
        return logits, looked
    for piece in wanted.pieces(logits.shape[1]):
        looked.found += token_logprobs(
            logits_of(wanted.places[piece]),
            wanted.token_ids[piece],
            wanted.num_logprobs[piece],
        )
    return logits, looked
