"""How likely tokens are by rows of logits: of those that were sampled, and of those of prompts.

Knows numbers; knows nothing about requests.
"""

import torch
from torch import Tensor

from aioserve.outputs import TokenLogprobs
from aioserve.runner.attention.backend import IntArray


def token_logprobs(
    logits: Tensor, token_ids: IntArray, num_logprobs: list[int]
) -> list[TokenLogprobs]:
    """How likely each of `token_ids` [N] is by its row of `logits` [N, V], with alternatives."""
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
