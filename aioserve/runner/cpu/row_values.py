"""Values of rows besides their tokens, for policies that want them: computed from their logits.

Knows logits and names. A function of another author that fails costs its values, and no request.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aioserve.request import ENTROPY, find_function
from aioserve.runner.attention.backend import StepInputs

logger = logging.getLogger(__name__)

ROWS_AT_A_TIME = 8  # of a vocabulary each, in float32: what is computed besides the logits
LOG_EVERY = 10.0  # seconds between two lines about functions that fail


def entropy(logits: Tensor) -> Tensor:
    """Of softmax(logits), in nats: [S] of [S, V]."""
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
        """The values of all rows; None if the function fails."""
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
