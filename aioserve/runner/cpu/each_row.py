"""Sampling that goes on when something raises: row after row, and a row that raises fails alone.

Knows rows of logits; knows nothing about how a token is chosen.
"""

import logging

import numpy as np
from torch import Tensor

from aioserve.outputs import TokenLogprobs
from aioserve.runner.batch.grammar_rows import Masks
from aioserve.runner.batch.sampling_columns import SamplingInputs
from aioserve.runner.cpu.sampler import SampledTokens, sample
from aioserve.runner.unsound import step_failed

logger = logging.getLogger(__name__)


def sample_each(logits: Tensor, inputs: SamplingInputs, masks: Masks | None) -> SampledTokens:
    """Sample rows at once, as `sample`, or one by one if that raises: a row fails for which it
    does.
    """
    try:
        return sample(logits, inputs, masks)
    except Exception:
        logger.exception("a token could not be chosen: the rows of the step are sampled apart")
    token_ids = np.zeros(len(logits), dtype=np.int64)
    logprobs: dict[int, TokenLogprobs] = {}
    failed: dict[int, str] = {}
    for row in range(len(logits)):
        try:
            found = sample(*_row(row, logits, inputs, masks))
        except Exception as error:
            failed[row] = step_failed(error)
            continue
        token_ids[row] = found.token_ids[0]
        if found.logprobs:
            logprobs[row] = found.logprobs[0]
        if found.failed:
            failed[row] = found.failed[0]
    return SampledTokens(token_ids, logprobs, failed)


def _row(
    row: int, logits: Tensor, inputs: SamplingInputs, masks: Masks | None
) -> tuple[Tensor, SamplingInputs, Masks | None]:
    """One of them as the only one of a step."""
    own = inputs.take(np.array([row]))
    if row in inputs.edits:
        own.edits[0] = inputs.edits[row]
    return logits[row : row + 1], own, None if masks is None else masks.of(row)
