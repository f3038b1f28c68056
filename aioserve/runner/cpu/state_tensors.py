"""What kernels of layers with states ask of tensors, and tensors as they ask for them.

Knows types, strides and limits; knows no layers.
"""

import torch
from torch import Tensor

from aioserve.kernels.state_steps import ELEMENTS, MULTIPLE


def fit(states: Tensor, *sizes: int) -> bool:
    """Whether kernels can compute on recurrent `states`: float32, each in one piece, and `sizes`,
    the lengths of their rows, multiples of 16.
    """
    is_plain = states.dtype is torch.float32 and states[0].is_contiguous()
    return is_plain and not any(size % MULTIPLE for size in sizes)


def plain(x: Tensor) -> Tensor:
    """`x` in float32, in one piece."""
    return x.float().contiguous()


def of_one_type(*tensors: Tensor) -> list[Tensor]:
    """Tensors [B, L, ...] of one type that kernels take, each token's numbers in one piece."""
    kind = tensors[0].dtype
    if kind not in ELEMENTS or any(x.dtype is not kind for x in tensors):
        tensors = tuple(x.float() for x in tensors)
    return [x if x[0, 0].is_contiguous() else x.contiguous() for x in tensors]
