"""Steps of layers with states by our kernels, in the place of `transformers`' reference code.

The modules of such layers call functions of their file by name: one for a token, one for a piece of
a text. On cards, `transformers` replaces these functions by kernels. Here a module gets a forward
pass of its own, in which the names mean our functions; other modules of the same class keep theirs.
Knows the names and arguments of these functions; does not know in which slots states are.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.kernels import KernelsUnavailableError
from aioserve.kernels.state_steps import MULTIPLE, StateSteps, load_state_steps

Function = Callable[..., Any]
Known = Callable[[], Tensor | None]  # the recurrent states of the pieces that are computed now


def describe_steps() -> str:
    """What computes the steps of states here: by such texts caches are compared."""
    try:
        load_state_steps()
    except KernelsUnavailableError:
        return "states by transformers' code"
    return "states by compiled steps"


def with_own_steps(module: nn.Module, known: Known) -> Function:
    """The forward pass of the class of `module` with our steps, or as it is where the kernels do
    not run.
    """
    bound: Function = MethodType(type(module).forward, module)
    try:
        steps = load_state_steps()
    except KernelsUnavailableError:
        return bound
    forward = inspect.unwrap(type(module).forward)
    reference = forward.__globals__
    own: dict[str, Function] = {
        "torch_recurrent_gated_delta_rule": _gated_delta,
        "mamba2_selective_state_update": _state_space,
        "mamba_selective_state_update": _selective_step,
        "mamba_selective_scan": partial(_selective_scan, known),
    }
    used = {
        name: partial(_if_served, partial(own[name], steps), reference[name])
        for name in forward.__code__.co_names
        if name in own
    }
    if not used:
        return bound
    mine = FunctionType(
        forward.__code__,
        {**reference, **used},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    mine.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(mine, module)


def _if_served(own: Function, reference: Function, *args: Any, **kwargs: Any) -> Any:
    """What `own` returns; where that is None, as `own` cannot do it, what `reference` returns."""
    found = own(*args, **kwargs)
    return reference(*args, **kwargs) if found is None else found


def _fit(states: Tensor, *sizes: int) -> bool:
    """Whether the kernels can compute on these states: float32, each in one piece, and `sizes`, the
    lengths of their rows, multiples of 16.
    """
    is_plain = states.dtype is torch.float32 and states[0].is_contiguous()
    return is_plain and not any(size % MULTIPLE for size in sizes)


def _plain(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _gated_delta(
    steps: StateSteps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor] | None:
    """One token of the gated delta rule: `query` and `key` [B, 1, Hk, Dk], `value` [B, 1, Hv, Dv],
    `g` and `beta` [B, 1, Hv]. The states [B, Hv, Dk, Dv] change in place.
    """
    if initial_state is None or query.shape[1] != 1 or not _fit(initial_state, value.shape[-1]):
        return None
    asked, own = (x[:, 0].float() for x in (query, key))
    if use_qk_l2norm_in_kernel:
        asked, own = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (asked, own))
    asked = asked * query.shape[-1] ** -0.5
    out = torch.empty(value[:, 0].shape, dtype=torch.float32)
    steps.gated_delta(
        initial_state,
        asked.contiguous(),
        own.contiguous(),
        _plain(value[:, 0]),
        _plain(g[:, 0]).exp(),
        _plain(beta[:, 0]),
        out,
    )
    return out[:, None].to(query.dtype), initial_state


def _state_space(
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
    `B` and `C` [B, groups, N]. What is one number for a head is expanded to its size.
    """
    of_heads = (dt[0], A, D, dt_bias)
    is_of_heads = all(x is not None and not any(x.stride()[1:]) for x in of_heads)
    if not is_of_heads or not _fit(state, state.shape[-1]) or D is None or dt_bias is None:
        return None
    step = dt[..., 0].float() + dt_bias[:, 0].float()
    step = (F.softplus(step) if dt_softplus else step).contiguous()
    out = torch.empty(hidden_states.shape, dtype=torch.float32)
    steps.state_space(
        state,
        _plain(hidden_states),
        torch.exp(step * A[:, 0, 0].float()),
        step,
        _plain(B),
        _plain(C),
        _plain(D[:, 0]),
        out,
    )
    if z is not None:
        out *= F.silu(z.float())
    return out.to(hidden_states.dtype)


def _selective_step(
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
    `dt` [B, channels], `B` and `C` [B, N].
    """
    if D is None or not _fit(state, state.shape[-1]):
        return None
    x, step, b, c = (row[:, :, None] for row in (hidden_states, dt, B, C))
    return _scanned(steps, state, x, step, b, c, A, D, dt_bias, dt_softplus, z)[..., 0]


def _selective_scan(
    known: Known,
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
    Behind the states of the pieces, of which the reference knows nothing.
    """
    states, shape = known(), (*hidden_states.shape[:2], A.shape[1])
    if states is None:
        states = hidden_states.new_zeros(shape, dtype=torch.float32)
    if D is None or states.shape != shape or not _fit(states, A.shape[1]):
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
    wide = _plain(x.transpose(1, 2))
    out = torch.empty_like(wide)
    b, c = _plain(b.transpose(1, 2)), _plain(c.transpose(1, 2))
    steps.scan(states, wide, step, _plain(a), b, c, _plain(d), out)
    if z is not None:
        out *= F.silu(z.reshape(out.shape[0], out.shape[2], -1).transpose(1, 2).float())
    return out.transpose(1, 2).to(x.dtype)
