"""Mamba 2 and Mamba 1 by our kernels, under the arguments of `transformers`' functions.

Knows the arguments; the recurrences are in kernels/src/state_space.h and selective_scan.h.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.kernels.state_steps import MOST_NUMBERS, StateSteps
from aioserve.runner.cpu.state_tensors import fit, of_one_type, plain


def _time_steps(dt: Tensor, bias: Tensor, has_softplus: bool) -> Tensor:
    step = dt.float() + bias.float()
    return (F.softplus(step) if has_softplus else step).contiguous()


def _space(
    steps: StateSteps,
    states: Tensor,
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
) -> Tensor:
    """Outputs [B, L, H, P] of tokens behind `states`, which become those behind the tokens."""
    wide, to_state, from_state = of_one_type(x, b, c)
    out = torch.empty(wide.shape, dtype=wide.dtype)
    decay = torch.exp(step * a.float())
    steps.state_space(states, wide, decay, step, to_state, from_state, plain(d), out)
    return out.to(x.dtype)


def state_space_token(
    steps: StateSteps,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """One token of Mamba 2: `state` [B, H, P, N] changes in place, `hidden_states` [B, H, P],
    `B` and `C` [B, groups, N]. What is one number for a head is expanded to its size. None where
    the kernel does not serve the shapes.
    """
    of_heads = (dt[0], A, D, dt_bias)
    is_of_heads = all(x is not None and not any(x.stride()[1:]) for x in of_heads)
    if not is_of_heads or not _fits(state) or D is None or dt_bias is None:
        return None
    step = _time_steps(dt[..., 0], dt_bias[:, 0], dt_softplus)[:, None]
    x, b, c = hidden_states[:, None], B[:, None], C[:, None]
    out = _space(steps, state, x, step, A[:, 0, 0], b, c, D[:, 0])[:, 0]
    return out if z is None else (out.float() * F.silu(z.float())).to(out.dtype)


def state_space_piece(
    steps: StateSteps,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Any:
    """Pieces of texts of Mamba 2: `hidden_states` [B, L, H, P], `dt` [B, L, H], `A` and `D` [H],
    `B` and `C` [B, L, groups, N]; `initial_states` [B, H, P, N] change in place. None where the
    kernel does not serve the shapes.
    """
    states = initial_states
    if states is None:
        shape = (len(dt), *hidden_states.shape[2:], B.shape[-1])
        states = hidden_states.new_zeros(shape, dtype=torch.float32)
    if D is None or D.dim() != 1 or dt_bias is None or z is not None or not _fits(states):
        return None
    step = _time_steps(dt, dt_bias, dt_softplus).clamp_(*dt_limit)
    out = _space(steps, states, hidden_states, step, A, B, C, D)
    return (out, states) if return_final_states else out


def _fits(states: Tensor) -> bool:
    return fit(states, states.shape[-1]) and max(states.shape[-2:]) <= MOST_NUMBERS


def selective_step(
    steps: StateSteps,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """One token of Mamba 1: `state` [B, channels, N], which changes in place, `hidden_states` and
    `dt` [B, channels], `B` and `C` [B, N]. None where the kernel does not serve the shapes.
    """
    if D is None or not fit(state, state.shape[-1]):
        return None
    x, step, b, c = (row[:, :, None] for row in (hidden_states, dt, B, C))
    return _scanned(steps, state, x, step, b, c, A, D, dt_bias, dt_softplus, z)[..., 0]


def selective_scan(
    known: Callable[[], Tensor | None],
    steps: StateSteps,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Pieces of texts of Mamba 1: `hidden_states` and `dt` [B, channels, L], `B` and `C` [B, N, L].
    Behind the states of the pieces, of which the reference knows nothing. None where the kernel
    does not serve the shapes.
    """
    states, shape = known(), (*hidden_states.shape[:2], A.shape[1])
    if states is None:
        states = hidden_states.new_zeros(shape, dtype=torch.float32)
    if D is None or states.shape != shape or not fit(states, A.shape[1]):
        return None
    out = _scanned(steps, states, hidden_states, dt, B, C, A, D, delta_bias, delta_softplus, z)
    return (out, states) if return_last_state else out


def _scanned(
    steps: StateSteps,
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    bias: Tensor | None,
    has_softplus: bool,
    z: Tensor | None,
) -> Tensor:
    """Outputs [B, channels, L] of tokens behind `states`, which become those behind the tokens."""
    step = dt.transpose(1, 2).float()
    if bias is not None:
        step = step + bias.float()
    step = (F.softplus(step) if has_softplus else step).contiguous()
    wide = plain(x.transpose(1, 2))
    out = torch.empty_like(wide)
    b, c = plain(b.transpose(1, 2)), plain(c.transpose(1, 2))
    steps.scan(states, wide, step, plain(a), b, c, plain(d), out)
    if z is not None:
        out *= F.silu(z.reshape(out.shape[0], out.shape[2], -1).transpose(1, 2).float())
    return out.transpose(1, 2).to(x.dtype)
