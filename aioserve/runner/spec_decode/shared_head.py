"""The head of a model that ranks share by tokens, put together on the first one, which drafts.

Each rank has it laid out in its own way; what it gives for unit vectors is the weight, to the bit.
"""

import torch
from torch import Tensor

from aioserve.runner.served_model import Halves
from aioserve.runner.tensor_parallel.group import Ranks

_PIECE = 256  # columns of the weight at a time
_TOLERANCE = 1e-2  # of logits that the weight gives, as a share of their size: roundings


def whole_head(halves: Halves, dtype: torch.dtype, hidden_size: int, ranks: Ranks) -> Tensor | None:
    """The weight [V, hidden] on the first rank, in `dtype`; None on the others, and if the head of
    `halves` does anything but multiply with it. To be called by all ranks.
    """
    columns = []
    for begin in range(0, hidden_size, _PIECE):
        unit = torch.eye(hidden_size, dtype=dtype)[begin : begin + _PIECE]
        logits = halves.logits(unit)
        if ranks.is_first:
            columns.append(logits.to(dtype))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, hidden_size, generator=generator).to(dtype)
    expected = halves.logits(rows)
    if not ranks.is_first:
        return None
    weight = torch.cat(columns).T.contiguous()
    error = (rows.float() @ weight.float().T - expected).norm()
    return weight if error <= _TOLERANCE * expected.norm() else None
