"""Chooses one token per row of logits, doing only what the rows ask for; tells its logprob.

If something raises, rows are sampled one after another, and a row that raises fails alone. Knows
numbers; knows nothing about requests.
"""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.kernels.tokens import ChosenTokens, RowDraws, load_chooser
from aioserve.outputs import TokenLogprobs
from aioserve.runner.attention.backend import IntArray
from aioserve.runner.batch import sampling_columns
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


FloatArray = npt.NDArray[np.float32]

NOISE_ELEMENTS = 1 << 16  # hashed at a time: what stays in a core's cache
TOP_P_CANDIDATES = 1024  # sorted first; a row whose mass is spread wider sorts its vocabulary


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
    asked = np.flatnonzero(inputs.num_logprobs != NO_LOGPROBS)
    if not chosen.are_sound:
        is_sound = np.isfinite(chosen.best)
        failed = {row: why_unsound(chosen.best[row]) for row in np.flatnonzero(~is_sound).tolist()}
        asked = asked[is_sound[asked]]
    if not len(asked):
        return SampledTokens(token_ids, {}, failed)
    rows = logits[torch.from_numpy(asked)]
    logprobs = token_logprobs(rows, token_ids[asked], inputs.num_logprobs[asked].tolist())
    return SampledTokens(token_ids, dict(zip(asked.tolist(), logprobs, strict=True)), failed)


def _choose(logits: Tensor, inputs: SamplingInputs, masks: "Masks | None") -> ChosenTokens:
    """Return a token for each of the S rows, and the largest logit that the row may take: a row
    whose best is not finite has none that means anything. No row is left open.
    """
    if not inputs.edits and masks is None:
        return _choose_from(logits.float(), inputs)
    is_edited = np.zeros(len(logits), dtype=np.bool_)
    is_edited[list(inputs.edits)] = True
    if masks is not None:
        is_edited[masks.places] = True
    if not is_edited.any():
        return _choose_from(logits.float(), inputs)
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
    others = _choose_from(logits[torch.from_numpy(plain)].float(), inputs.take(plain))
    token_ids = np.empty(len(logits), dtype=np.int64)
    best = np.empty(len(logits), dtype=np.float32)
    token_ids[rows], best[rows] = found.token_ids, found.best
    token_ids[plain], best[plain] = others.token_ids, others.best
    return ChosenTokens(token_ids, best, None, found.are_sound and others.are_sound)


def _choose_from(logits: Tensor, inputs: SamplingInputs) -> ChosenTokens:
    """Return a token for each row of `logits`, float32, by the compiled library where there is one.
    What that leaves open is drawn here, by the same rules: the token is the same.
    """
    if (chooser := load_chooser()) is not None:
        draws = None
        if inputs.temperature.any():
            with np.errstate(divide="ignore"):
                least = np.log(inputs.min_p)
            draws = RowDraws(inputs.top_k, inputs.top_p, least, inputs.seeds, inputs.num_tokens)
        chosen = chooser.choose(logits.contiguous(), inputs.temperature, draws)
    else:
        chosen = _best(logits)
        is_random = inputs.temperature > 0
        chosen = chosen._replace(is_open=is_random & np.isfinite(chosen.best))
    if (is_open := chosen.is_open) is not None and is_open.any():
        rows = logits[torch.from_numpy(is_open)]
        chosen.token_ids[is_open] = _choose_randomly(rows, inputs.take(is_open))
    return chosen


def _mask(logits: Tensor, places: IntArray, masks: "Masks") -> None:
    """Leave of the rows at `places` what their masks allow."""
    values = logits.numpy()
    values[places] = np.where(masks.allowed(values.shape[1]), values[places], -np.inf)


def _best(logits: Tensor) -> ChosenTokens:
    """Return the first of the largest of each row, and its logit: NaN if there is any in the
    row.
    """
    values = logits.numpy()
    token_ids = _argmax(values)
    best = values[np.arange(len(token_ids)), token_ids]
    return ChosenTokens(token_ids, best, None, bool(np.isfinite(best).all()))


def _argmax(values: FloatArray) -> IntArray:
    """Return the first of the largest. By numpy: torch's took 6 times as long, 16 times in
    bfloat16.
    """
    chosen: IntArray = values.argmax(axis=-1)
    return chosen


def _choose_randomly(logits: Tensor, inputs: SamplingInputs) -> IntArray:
    """Temperature, top-k, top-p, min-p, and a draw, for rows that are all random; float32."""
    # the most likely token becomes 0, so that no temperature, however small, can overflow
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits /= torch.from_numpy(inputs.temperature)[:, None]
    keys = sampling_columns.row_keys(inputs.seeds, inputs.num_tokens)
    with np.errstate(divide="ignore"):
        floor = torch.from_numpy(np.log(inputs.min_p))  # min-p as a bound on logits
    token_ids = np.empty(len(keys), dtype=np.int64)
    limited = (inputs.top_k > 0) | (inputs.top_p < 1)
    for rows, draw in ((~limited, _draw_from_all), (limited, _draw_from_most_likely)):
        if rows.any():
            which = torch.from_numpy(rows)
            token_ids[rows] = draw(logits[which], keys[rows], floor[which], inputs.take(rows))
    return token_ids


def _draw_from_all(
    logits: Tensor, keys: sampling_columns.Words, floor: Tensor, inputs: SamplingInputs
) -> IntArray:
    """Draw a token for each row from the whole vocabulary."""
    logits = logits.masked_fill_(logits < floor[:, None], float("-inf"))
    vocabulary = np.arange(logits.shape[1], dtype=np.uint32)
    step = max(1, NOISE_ELEMENTS // logits.shape[1])
    chosen = [
        _argmax(
            (logits[begin : begin + step] + _gumbel(keys[begin : begin + step], vocabulary)).numpy()
        )
        for begin in range(0, len(keys), step)
    ]
    return np.concatenate(chosen)


def _draw_from_most_likely(
    logits: Tensor, keys: sampling_columns.Words, floor: Tensor, inputs: SamplingInputs
) -> IntArray:
    """Draw from the tokens that top-k and top-p leave.

    Both keep every token that is at least as likely as the last one kept, as top-k does in
    transformers: the choice among equals must not depend on how the rows of a batch are sorted.
    """
    vocab_size = logits.shape[1]
    wanted = np.where(inputs.top_k > 0, inputs.top_k + 1, TOP_P_CANDIDATES)
    num_candidates = min(vocab_size, int(wanted.max()))
    token_ids = np.empty(len(keys), dtype=np.int64)
    pending = np.arange(len(keys))
    while len(pending):
        which = torch.from_numpy(pending)
        rows = inputs.take(pending)
        values, candidates = logits[which].topk(num_candidates)
        lowest = _lowest_kept(values, logits[which], rows)
        # equals of the last token kept may lie beyond the candidates
        complete = (values[:, -1] < lowest).numpy() | (num_candidates == vocab_size)
        scores = values + _gumbel(keys[pending], candidates.numpy().astype(np.uint32))
        scores.masked_fill_(values < torch.maximum(lowest, floor[which])[:, None], float("-inf"))
        chosen = candidates.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0].numpy()
        token_ids[pending[complete]] = chosen[complete]
        pending, num_candidates = pending[~complete], vocab_size
    return token_ids


def _lowest_kept(values: Tensor, logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return the smallest logit [N] that top-k, then top-p, keep; `values` [N, K] are sorted,
    falling.
    """
    num_candidates = values.shape[1]
    top_k = torch.from_numpy(inputs.top_k)
    last = torch.where(top_k > 0, top_k, num_candidates).clamp(max=num_candidates) - 1
    kept = values >= values.gather(1, last[:, None])
    weights = values.double().exp() * kept
    mass = weights.cumsum(dim=1)
    all_mass = torch.where(top_k > 0, mass[:, -1], logits.double().exp().sum(dim=1))
    top_p = torch.from_numpy(inputs.top_p).double()
    target = torch.where(top_p < 1, top_p * all_mass, float("inf"))
    kept &= mass - weights < target[:, None]  # what comes before a token lacks mass
    return values.gather(1, (kept.sum(dim=1, keepdim=True) - 1).clamp(min=0))[:, 0]  # one at least


def _gumbel(keys: sampling_columns.Words, token_ids: sampling_columns.Words) -> Tensor:
    """Noise [N, V] that makes argmax(logits + noise) a draw from softmax(logits) (Gumbel-max)."""
    uniform = torch.from_numpy(
        sampling_columns.uniform(sampling_columns.hash_tokens(keys, token_ids))
    )
    return uniform.log_().neg_().log_().neg_()


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
