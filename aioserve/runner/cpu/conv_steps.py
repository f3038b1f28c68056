"""Causal convolutions by our kernels, under the arguments of `transformers`' functions.

Knows the arguments; the sums are in kernels/src/causal_conv.h.
"""

from typing import Any

import torch
from torch import Tensor

from aioserve.kernels.state_steps import ELEMENTS, MOST_TAPS, MULTIPLE, StateSteps

_HAS_SILU = {None: False, "silu": True, "swish": True}  # by the activation's name


def _serves(x: Tensor, weight: Tensor, activation: str | None) -> bool:
    """Whether the kernels convolve `x` [B, channels, L] by `weight` [channels, taps]."""
    channels, taps = weight.shape
    is_known = activation in _HAS_SILU and x.dtype in ELEMENTS
    return is_known and not channels % MULTIPLE and taps <= MOST_TAPS


def conv_piece(
    steps: StateSteps,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor | None:
    """Pieces of texts [B, channels, L], in front of which are zeros. The result lies in memory
    token by token, as what follows reads it. None where the kernel does not serve the arguments.
    """
    if not _serves(hidden_states, weight, activation):
        return None
    x = hidden_states.transpose(1, 2)
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    taps = weight.t().float().contiguous()
    added = None if bias is None else bias.float()
    steps.conv(x, taps, added, _HAS_SILU[activation], out)
    return out.transpose(1, 2)


def conv_token(
    steps: StateSteps,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | None:
    """One token [B, channels, 1] behind `conv_state` [B, channels, width], which changes in place.
    None where the kernel does not serve the arguments.
    """
    width = conv_state.shape[-1]
    is_of_one_type = all(
        x is None or x.dtype is hidden_states.dtype for x in (conv_state, weight, bias)
    )
    if (
        not is_of_one_type
        or not _serves(hidden_states, weight, activation)
        or hidden_states.shape[-1] != 1
        or not weight.shape[1] - 1 <= width <= MOST_TAPS
        or not conv_state[0].is_contiguous()
    ):
        return None
    x = hidden_states[..., 0]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    steps.conv_step(conv_state, x, weight.contiguous(), bias, _HAS_SILU[activation], out)
    return out[..., None]
