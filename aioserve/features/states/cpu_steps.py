"""Layers with states by our kernels, in the place of `transformers`' reference code.

Convolutions, the gated delta rule, gated norms, Mamba 2 and Mamba 1, each under the arguments of
the function that it replaces; last, how a module gets them. Loaded for models that have such
layers.
"""

import copy
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.kernels import KernelsUnavailableError
from aioserve.kernels.state_steps import (
    ELEMENTS,
    MOST_NUMBERS,
    MOST_TAPS,
    MULTIPLE,
    StateSteps,
    load_state_steps,
)


def fit(states: Tensor, *sizes: int) -> bool:
    """Return whether kernels can compute on recurrent `states`: float32, each in one piece, and
    `sizes`, the lengths of their rows, multiples of 16.
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


# Causal convolutions by our kernels, under the arguments of `transformers`' functions. Knows the
# arguments; the sums are in kernels/src/causal_conv.h.


_HAS_SILU = {None: False, "silu": True, "swish": True}  # by the activation's name


def _serves(x: Tensor, weight: Tensor, activation: str | None) -> bool:
    """Return whether the kernels convolve `x` [B, channels, L] by `weight` [channels, taps]."""
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
    """Return one token [B, channels, 1] behind `conv_state` [B, channels, width], which changes in
    place. None where the kernel does not serve the arguments.
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


# The gated delta rule by our kernels, under the arguments of `transformers`' functions. Serves the
# function for one token and the one for a piece of a text: a kernel takes any number of tokens,
# behind their states. Knows the arguments; the rule is in kernels/src/gated_delta.h.


def gated_delta(
    steps: StateSteps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """Outputs [B, L, Hv, Dv] and the states [B, Hv, Dk, Dv] behind the tokens, which are those of
    `initial_state`, changed in place. `query` and `key` [B, L, Hk, Dk], `value` [B, L, Hv, Dv], `g`
    and `beta` [B, L, Hv]. None where the kernel does not serve the shapes.
    """
    rows, _tokens, heads, value_dim = value.shape
    key_dim = key.shape[-1]
    states = initial_state
    if states is None:
        states = value.new_zeros((rows, heads, key_dim, value_dim), dtype=torch.float32)
    if key_dim > MOST_NUMBERS or not fit(states, value_dim):
        return None
    asked, own, given = of_one_type(query, key, value)
    out = torch.empty(given.shape, dtype=given.dtype)
    steps.gated_delta(
        states,
        asked,
        own,
        given,
        plain(g).exp(),
        plain(beta),
        out,
        is_normalized=use_qk_l2norm_in_kernel,
        scale=key_dim**-0.5,
    )
    return out.to(query.dtype), states if output_final_state else None


# Gated norms of layers with states by our kernel, in the place of a dozen passes of torch.
# Architectures differ in whether the gate stands before or behind the norm, and in how many numbers
# are normed together. Which of these a module does is found by its own code, on numbers at random.


_NAMES = ["self", "hidden_states", "gate"]


class GatedNorm(NamedTuple):
    """A gated RMSNorm as a module of `transformers` computes it."""

    size: int  # numbers that are normed together
    eps: float
    is_gated_first: bool

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """`x` and `gate` [..., row], of one type."""
        rows, opened = (t.reshape(-1, x.shape[-1]) for t in (x, gate))
        rows = rows.contiguous()
        opened = opened if opened.stride(1) == 1 else opened.contiguous()
        out = torch.empty_like(rows)
        load_state_steps().gated_norm(
            rows, opened, weight, self.eps, self.size, self.is_gated_first, out
        )
        return out.view(x.shape)


def with_own_norms(module: nn.Module) -> None:
    """Let the gated norms within `module` be computed by the kernel, where it serves them."""
    for child in module.modules():
        kind = type(child)
        if "gated_norm" in vars(kind) or list(inspect.signature(kind.forward).parameters) != _NAMES:
            continue
        if (norm := _recognized(child)) is not None:
            child.__class__ = _own_class(kind, norm)  # type: ignore[arg-type]  # it can be hashed


@cache
def _own_class(reference: type[nn.Module], norm: GatedNorm) -> type[nn.Module]:
    """Return a class whose modules, copies of them too, compute `norm` by the kernel."""

    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        weight = self.weight
        if (
            gate is None
            or hidden_states.dtype is not gate.dtype
            or hidden_states.dtype not in ELEMENTS
            or weight.dtype not in ELEMENTS
            or hidden_states.shape != gate.shape
        ):
            found: Tensor = reference.forward(self, hidden_states, gate)
            return found
        return norm(hidden_states, gate, weight)

    return type(reference.__name__, (reference,), {"forward": forward, "gated_norm": norm})


def _recognized(module: nn.Module) -> GatedNorm | None:
    """Return what the module computes, if it is what the kernel does."""
    weights = list(module.parameters())
    eps = getattr(module, "variance_epsilon", None)
    if len(weights) != 1 or weights[0].dim() != 1 or not isinstance(eps, float):
        return None
    width = len(weights[0])
    size = getattr(module, "group_size", width // getattr(module, "n_groups", 1))
    if weights[0].device.type != "cpu" or not size or size % MULTIPLE or width % size:
        return None
    probe = copy.deepcopy(module).float()
    (scale,) = probe.parameters()
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(3, width, generator=generator) for _ in range(2))
    with torch.no_grad():
        scale.copy_(torch.randn(width, generator=generator))
        expected = probe(x, gate)
        for is_gated_first in (False, True):
            norm = GatedNorm(size, eps, is_gated_first)
            if torch.allclose(norm(x, gate, scale), expected, rtol=1e-4, atol=1e-5):
                return norm
    return None


# Mamba 2 and Mamba 1 by our kernels, under the arguments of `transformers`' functions. Knows the
# arguments; the recurrences are in kernels/src/state_space.h and selective_scan.h.


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
    """Return one token of Mamba 2: `state` [B, H, P, N] changes in place, `hidden_states` [B, H,
    P], `B` and `C` [B, groups, N]. What is one number for a head is expanded to its size. None
    where the kernel does not serve the shapes.
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
    """Return one token of Mamba 1: `state` [B, channels, N], which changes in place,
    `hidden_states` and `dt` [B, channels], `B` and `C` [B, N]. None where the kernel does not serve
    the shapes.
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


# Layers with states by our kernels, in the place of `transformers`' reference code. The modules of
# such layers call functions of their file by name: one for a token, one for a piece of a text, two
# for convolutions. On cards, `transformers` replaces these functions by kernels. Here a module gets
# a forward pass of its own, in which the names mean our functions; other modules of the same class
# keep theirs. Knows the names of these functions; does not know in which slots states are.


Function = Callable[..., Any]
Known = Callable[[], Tensor | None]  # the recurrent states of the pieces that are computed now


def describe_steps() -> str:
    """Return what computes the steps of states here: by such texts caches are compared."""
    try:
        load_state_steps()
    except KernelsUnavailableError:
        return "states by transformers' code"
    return "states by compiled steps"


def with_own_steps(module: nn.Module, known: Known) -> Function:
    """Return the forward pass of the class of `module` with our functions, or as it is where the
    kernels do not run.
    """
    bound: Function = MethodType(type(module).forward, module)
    try:
        steps = load_state_steps()
    except KernelsUnavailableError:
        return bound
    with_own_norms(module)
    forward = inspect.unwrap(type(module).forward)
    reference = forward.__globals__
    own: dict[str, Function] = {
        "causal_conv1d_fn": conv_piece,
        "causal_conv1d_update": conv_token,
        "torch_chunk_gated_delta_rule": gated_delta,
        "torch_recurrent_gated_delta_rule": gated_delta,
        "mamba2_chunk_scan": state_space_piece,
        "mamba2_selective_state_update": state_space_token,
        "mamba_selective_state_update": selective_step,
        "mamba_selective_scan": partial(selective_scan, known),
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
    """Return what `own` returns; where that is None, as `own` cannot do it, what `reference`
    returns.
    """
    found = own(*args, **kwargs)
    return reference(*args, **kwargs) if found is None else found
