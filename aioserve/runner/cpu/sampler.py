"""Chooses one token per row of logits, doing only what the rows ask for; tells its logprob.

If something raises, rows are sampled one after another, and a row that raises fails alone. Knows
numbers; knows nothing about requests.
"""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from aioserve.kernels.tokens import ChosenTokens, load_chooser
from aioserve.outputs import TokenLogprobs
from aioserve.runner.attention.backend import IntArray
from aioserve.runner.batch.sampling_columns import NO_LOGPROBS, SamplingInputs
from aioserve.runner.interface import step_failed, why_unsound

if TYPE_CHECKING:
    from aioserve.runner.batch.masks import Masks


def token_logprobs(
    logits: Tensor, token_ids: IntArray, num_logprobs: list[int]
) -> list[TokenLogprobs]:
    """Return how likely each of `token_ids` [N] is by its row of `logits` [N, V], with
    alternatives.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    sampled = logprobs.gather(1, torch.from_numpy(token_ids)[:, None])
    ranks = (logprobs > sampled).sum(dim=1) + 1
    values, ids = logprobs.topk(min(max(num_logprobs), logits.shape[1]))
    columns = zip(
        sampled[:, 0].tolist(),
        ranks.tolist(),
        ids.tolist(),
        values.tolist(),
        num_logprobs,
        strict=True,
    )
    return [TokenLogprobs(own, rank, i[:n], v[:n]) for own, rank, i, v, n in columns]


# Chooses one token per row of logits, doing only what the rows ask for. Knows numbers and columns;
# knows nothing about requests, batches or models. The same seed, position and logits give the same
# token whatever else is in the batch.


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each of the S rows."""

    token_ids: IntArray  # S
    logprobs: dict[int, TokenLogprobs]  # by row, for those that asked
    #: Rows whose token means nothing, and why.
    failed: dict[int, str] = field(default_factory=dict)


def sample(logits: Tensor, inputs: SamplingInputs, masks: "Masks | None" = None) -> SampledTokens:
    """Choose a token from each row of `logits` [S, V], of any floating type and not changed.

    The operations and their order are defined in the docstring of `SamplingParams`. A row whose
    best logit is not finite fails alone.
    """
    chosen = _choose(logits, inputs, masks)
    token_ids, failed = chosen.token_ids, dict[int, str]()
    if chosen.best is None and not inputs.asks_logprobs:
        return SampledTokens(token_ids, {}, failed)
    asked = np.flatnonzero(inputs.num_logprobs != NO_LOGPROBS)
    if chosen.best is not None:
        is_sound = np.isfinite(chosen.best)
        failed = {row: why_unsound(chosen.best[row]) for row in np.flatnonzero(~is_sound).tolist()}
        asked = asked[is_sound[asked]]
    if not len(asked):
        return SampledTokens(token_ids, {}, failed)
    rows = logits[torch.from_numpy(asked)]
    logprobs = token_logprobs(rows, token_ids[asked], inputs.num_logprobs[asked].tolist())
    return SampledTokens(token_ids, dict(zip(asked.tolist(), logprobs, strict=True)), failed)


def _choose(logits: Tensor, inputs: SamplingInputs, masks: "Masks | None") -> ChosenTokens:
    """Return a token for each of the S rows, and the largest logits that the rows may take unless
    all are finite: a row whose best is not has no token that means anything. No row is left open.
    """
    if not inputs.edits and masks is None:
        return _choose_from(logits, inputs)
    is_edited = np.zeros(len(logits), dtype=np.bool_)
    is_edited[list(inputs.edits)] = True
    if masks is not None:
        is_edited[masks.places] = True
    if not is_edited.any():
        return _choose_from(logits, inputs)
    rows = np.flatnonzero(is_edited)
    edited = logits[torch.from_numpy(rows)].float()
    for place, row in enumerate(rows.tolist()):
        if row in inputs.edits:
            inputs.edits[row].apply(edited[place], int(inputs.num_tokens[row]))
    if masks is not None:
        _mask(edited, np.searchsorted(rows, masks.places), masks)
    found = _choose_from(edited, inputs.take(rows))
    if len(rows) == len(logits):
        return found
    plain = np.flatnonzero(~is_edited)
    others = _choose_from(logits[torch.from_numpy(plain)], inputs.take(plain))
    token_ids = np.empty(len(logits), dtype=np.int64)
    token_ids[rows], token_ids[plain] = found.token_ids, others.token_ids
    if found.best is None and others.best is None:
        return ChosenTokens(token_ids, None, None)
    best = np.zeros(len(logits), dtype=np.float32)  # finite
    for places, own in ((rows, found.best), (plain, others.best)):
        if own is not None:
            best[places] = own
    return ChosenTokens(token_ids, best, None)


def _choose_from(logits: Tensor, inputs: SamplingInputs) -> ChosenTokens:
    """Return a token for each row of `logits` by the compiled library where there is one. What that
    leaves open is drawn here, by the same rules: the token is the same.
    """
    if (chooser := load_chooser()) is not None:
        chosen = chooser.choose(logits, inputs.draws)
    else:
        chosen = _best(logits.float())
        is_random = inputs.temperature > 0
        is_sound = chosen.best is None or np.isfinite(chosen.best)
        chosen = chosen._replace(is_open=is_random & is_sound)
    if (is_open := chosen.is_open) is not None and is_open.any():
        from aioserve.runner.cpu.draws import draw

        rows = logits[torch.from_numpy(is_open)].float()
        chosen.token_ids[is_open] = draw(rows, inputs.take(is_open))
    return chosen


def _mask(logits: Tensor, places: IntArray, masks: "Masks") -> None:
    """Leave of the rows at `places` what their masks allow."""
    values = logits.numpy()
    values[places] = np.where(masks.allowed(values.shape[1]), values[places], -np.inf)


def _best(logits: Tensor) -> ChosenTokens:
    """Return the first of the largest of each row, and its logit, NaN if there is any in the row,
    unless all are finite.
    """
    values = logits.numpy()
    token_ids: IntArray = values.argmax(axis=-1)  # torch's took 6 times as long
    best = values[np.arange(len(token_ids)), token_ids]
    return ChosenTokens(token_ids, None if np.isfinite(best).all() else best, None)


# Sampling that goes on when something raises: row after row, and a row that raises fails alone.
# Knows rows of logits; knows nothing about how a token is chosen.


logger = logging.getLogger(__name__)


def sample_each(logits: Tensor, inputs: SamplingInputs, masks: "Masks | None") -> SampledTokens:
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
    row: int, logits: Tensor, inputs: SamplingInputs, masks: "Masks | None"
) -> "tuple[Tensor, SamplingInputs, Masks | None]":
    """Return one of them as the only one of a step."""
    own = inputs.take(np.array([row]))
    if row in inputs.edits:
        own.edits[0] = inputs.edits[row]
    return logits[row : row + 1], own, None if masks is None else masks.of(row)
