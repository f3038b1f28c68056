"""K and V as int8, in plain torch: codes of a token and head, and behind them their scale.

Knows rows of numbers; knows nothing of blocks and requests.
"""

import math

import torch
from torch import Tensor

from aioserve.runner.attention.backend import SCALE_BYTES


def encode_rows(states: Tensor) -> Tensor:
    """[..., D] in float32 -> [..., D + 4] int8: codes, and the bytes of the scale of all of them.

    As the kernels do it, to the bit (`store_row_of_codes` in C).
    """
    most = states.abs().amax(dim=-1, keepdim=True).clamp(max=3.39e38)  # 127 * scale is finite
    most[most < 1e-30] = math.inf  # too small for an inverse: zeros
    largest = torch.tensor(127.0)  # `127 / most` would be 127 * (1 / most), rounded twice
    codes = torch.round(states * (largest / most)).to(torch.int8)
    scales = torch.where(most.isinf(), 0.0, most / largest)
    return torch.cat([codes, scales.view(torch.int8)], dim=-1)


def decode_rows(rows: Tensor) -> Tensor:
    """The numbers that `encode_rows` was given, rounded."""
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous()
    return codes.float() * scales.view(torch.float32)
