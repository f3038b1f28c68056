"""The persistent batch of a runner that plans a step before it knows the last one's tokens.

A token that was sampled and not read is a marker; the device puts the token in its place.
"""

import numpy as np

from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.batch.input_batch import InputBatch


class OverlappedBatch(InputBatch):
    """An `InputBatch` whose sampled tokens stay on the device."""

    def append_unknown(self, inputs: StepInputs) -> None:
        """Count the tokens that the step of `inputs` samples; each is the marker -1 - row.

        A row samples nothing more until its marker was computed, so the marker always means the
        last token of its row. It is never replaced: a request that comes back after a preemption
        brings all its tokens.
        """
        rows, position = inputs.rows[inputs.sampling], inputs.seq_lens[inputs.sampling]
        self._token_ids[rows, position] = (-1 - rows).astype(np.int32)
        self._num_tokens[rows] = position + 1
