"""Draws a token for each row that the compiled library leaves open, by numpy and torch.

The token is the one that the library would draw: the same seed, position and logits give the same
token whatever else is in the batch. Loaded with the first such row. Knows numbers and columns.
"""

import numpy as np
import torch
from torch import Tensor

from aioserve.runner.attention.backend import IntArray
from aioserve.runner.batch.sampling_columns import (
    SamplingInputs,
    Words,
    hash_tokens,
    row_keys,
    uniform,
)

NOISE_ELEMENTS = 1 << 16  # hashed at a time: what stays in a core's cache
TOP_P_CANDIDATES = 1024  # sorted first; a row whose mass is spread wider sorts its vocabulary


def draw(logits: Tensor, inputs: SamplingInputs) -> IntArray:
    """Return a token for each row of `logits`, float32, that all are random: temperature, top-k,
    top-p, min-p, and a draw.
    """
    # the most likely token becomes 0, so that no temperature, however small, can overflow
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits /= torch.from_numpy(inputs.temperature)[:, None]
    keys = row_keys(inputs.seeds, inputs.num_tokens)
    floor = torch.from_numpy(inputs.log_min_p)
    token_ids = np.empty(len(keys), dtype=np.int64)
    limited = (inputs.top_k > 0) | (inputs.top_p < 1)
    for rows, choose in ((~limited, _draw_from_all), (limited, _draw_from_most_likely)):
        if rows.any():
            which = torch.from_numpy(rows)
            token_ids[rows] = choose(logits[which], keys[rows], floor[which], inputs.take(rows))
    return token_ids


def _draw_from_all(logits: Tensor, keys: Words, floor: Tensor, inputs: SamplingInputs) -> IntArray:
    """Draw a token for each row from the whole vocabulary."""
    logits = logits.masked_fill_(logits < floor[:, None], float("-inf"))
    vocabulary = np.arange(logits.shape[1], dtype=np.uint32)
    step = max(1, NOISE_ELEMENTS // logits.shape[1])
    chosen = [
        (logits[begin : begin + step] + _gumbel(keys[begin : begin + step], vocabulary))
        .numpy()
        .argmax(axis=-1)  # torch's took 6 times as long
        for begin in range(0, len(keys), step)
    ]
    return np.concatenate(chosen)


def _draw_from_most_likely(
    logits: Tensor, keys: Words, floor: Tensor, inputs: SamplingInputs
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


def _gumbel(keys: Words, token_ids: Words) -> Tensor:
    """Noise [N, V] that makes argmax(logits + noise) a draw from softmax(logits) (Gumbel-max)."""
    noise = torch.from_numpy(uniform(hash_tokens(keys, token_ids)))
    return noise.log_().neg_().log_().neg_()
