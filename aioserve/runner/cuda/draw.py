"""A token per row of logits without asking the host, in plain torch: what Triton kernels replace.

The definition that they are tested against, and what runs where Triton does not. Knows tensors;
no branch depends on what is in one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


class DrawColumns(NamedTuple):
    """How each of the S rows is drawn; on the device."""

    temperature: Tensor  # float32, 0 = greedy
    top_k: Tensor  # int32, 0 = all
    top_p: Tensor  # float32
    min_p_floor: Tensor  # float32, log(min_p)
    keys: Tensor  # int32 [2, S], contiguous, bits of `noise.row_keys`
    is_limited: bool  # whether any row has top-k or top-p


def draw(logits: Tensor, columns: DrawColumns) -> Tensor:
    """Token ids int64 [S] from `logits` [S, V] of any floating type, as `cpu.sampler.sample`."""
    heat = columns.temperature[:, None]
    scaled = logits.float() - logits.amax(dim=-1, keepdim=True).float()
    scaled = scaled / torch.where(heat > 0, heat, 1.0)
    floor = columns.min_p_floor
    if columns.is_limited:
        floor = torch.maximum(floor, lowest_kept(scaled, columns.top_k, columns.top_p))
    uniform = uniforms(columns.keys, logits.shape[1])
    score = scaled + uniform.log_().neg_().log_().neg_()
    score = score.masked_fill_(scaled < floor[:, None], float("-inf"))
    return torch.where(heat > 0, score, scaled).argmax(dim=-1)


def lowest_kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest of `scaled` [S, V] that top-k, then top-p keep; equals are kept together."""
    size = scaled.shape[1]
    values = scaled.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, size).clamp(max=size).long() - 1
    weights = values.double().exp() * (values >= values.gather(1, last[:, None]))
    mass = weights.cumsum(dim=1)
    target = torch.where(top_p < 1, top_p.double() * mass[:, -1], float("inf"))
    # what comes before a token that is kept lacks mass
    kept = (weights > 0) & (mass - weights < target[:, None])
    return values.gather(1, (kept.sum(dim=1, keepdim=True) - 1).clamp(min=0))[:, 0]  # one at least


def uniforms(keys: Tensor, size: int) -> Tensor:
    """`noise.uniform(noise.hash_tokens(keys, [0, size)))`, float32 [S, size]."""
    key0, key1 = (keys.long() & _WORD).unsqueeze(2)
    token_ids = torch.arange(size, device=keys.device)
    words = _mix(_mix((token_ids + key0) & _WORD) ^ key1)
    return ((words >> 9).float() + 0.5) * 2**-23


def _mix(words: Tensor) -> Tensor:
    """`noise.mix` on 32-bit words in int64, whose products only need their low bits."""
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & _WORD
    words = words ^ (words >> 15)
    words = (words * 0x846CA68B) & _WORD
    return words ^ (words >> 16)
