"""What a step tells besides tokens, where it is asked: of prompts, and values of rows.

How likely the tokens of prompts are, and vectors of prompts, from a pass that looks at them;
values for policies, computed from logits. Loaded when the first request asks.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aioserve.outputs import TokenLogprobs, Vector
from aioserve.request import ENTROPY, find_function
from aioserve.runner.adapters import AdapterOwners, TokenAdapters
from aioserve.runner.attention.backend import IntArray, LayerAttention, ModelInputs, StepInputs
from aioserve.runner.batch.prompt_rows import WantedLogprobs, WantedStates
from aioserve.runner.cpu.sampler import token_logprobs
from aioserve.runner.served_model import Halves


@dataclass(slots=True)
class Looked:
    """Results that a step has found for prompts, and that have not been kept yet."""

    wanted: WantedLogprobs | None
    pooled: WantedStates | None
    totals: Tensor | None  # of `pooled`
    found: list[TokenLogprobs] = field(default_factory=list)  # at those of `wanted`

    def keep(
        self, failed: dict[str, str]
    ) -> tuple[dict[str, list[TokenLogprobs]], dict[str, Vector]]:
        """Return the results that are complete with this step, by request. Vectors that are no
        numbers are among what has `failed` instead.
        """
        told = {} if self.wanted is None else self.wanted.keep(self.found)
        if self.pooled is None or self.totals is None:
            return told, {}
        return told, self.pooled.keep(self.totals, failed)


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

    looked = Looked(wanted, pooled, None if pooled is None else pooled.totals(of(pooled.places)))
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


# Values of rows besides their tokens, for policies that want them: computed from their logits.
# Knows logits and names. A function of another author that fails costs its values, and no request.


logger = logging.getLogger(__name__)

ROWS_AT_A_TIME = 8  # of a vocabulary each, in float32: what is computed besides the logits
LOG_EVERY = 10.0  # seconds between two lines about functions that fail


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits), in nats: [S] of [S, V]."""
    terms: Tensor = torch.special.entr(logits.softmax(dim=-1))
    return terms.sum(dim=-1)


class RowValueStep:
    """The values of the rows of one step."""

    _logged_at = -LOG_EVERY  # by any step

    def __init__(self, wanted: Mapping[str, tuple[str, ...]], logits: Tensor) -> None:
        """`wanted`: names by request id; `logits` [S, V] of the rows that sample, of any floating
        type and not changed.
        """
        self._wanted = wanted
        self._values: dict[str, list[float]] = {}
        for name in {name: None for names in wanted.values() for name in names}:
            found = self._compute(name, logits)
            if found is not None:
                self._values[name] = found

    def of_newest(
        self, inputs: StepInputs, token_ids: list[list[int]]
    ) -> dict[str, dict[str, float]]:
        """By request, the values of the row that its newest token was drawn from; `token_ids` are
        what was kept of each request. A value that is not finite is left out.
        """
        first: dict[int, int] = {}  # by request, its first row: it has another for each draft
        for row, index in enumerate(inputs.sampling.tolist()):
            first.setdefault(index, row)
        found = {}
        for index, (request_id, own) in enumerate(zip(inputs.req_ids, token_ids, strict=True)):
            if not own or request_id not in self._wanted:
                continue
            row = first[index] + len(own) - 1
            values = {name: values[row] for name, values in self._values.items()}
            found[request_id] = {n: value for n, value in values.items() if math.isfinite(value)}
        return found

    def _compute(self, name: str, logits: Tensor) -> list[float] | None:
        """Return the values of all rows; None if the function fails."""
        try:
            function: Callable[[Tensor], Any] = entropy if name == ENTROPY else find_function(name)
            found: list[float] = []
            for begin in range(0, len(logits), ROWS_AT_A_TIME):
                rows = logits[begin : begin + ROWS_AT_A_TIME]
                values = np.asarray(function(rows.float()), dtype=np.float64)
                if values.shape != (len(rows),):
                    raise ValueError(f"{len(rows)} rows gave values of shape {values.shape}")
                found += values.tolist()
        except Exception:
            now = time.monotonic()
            if now - RowValueStep._logged_at >= LOG_EVERY:
                RowValueStep._logged_at = now
                logger.exception("the row value %r could not be computed, and is left out", name)
            return None
        return found
