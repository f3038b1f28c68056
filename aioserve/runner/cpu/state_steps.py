"""Layers with states by our kernels, in the place of `transformers`' reference code.

The modules of such layers call functions of their file by name: one for a token, one for a piece of
a text, two for convolutions. On cards, `transformers` replaces these functions by kernels. Here a
module gets a forward pass of its own, in which the names mean our functions; other modules of the
same class keep theirs. Knows the names of these functions; does not know in which slots states are.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from aioserve.kernels import KernelsUnavailableError
from aioserve.kernels.state_steps import load_state_steps
from aioserve.runner.cpu.conv_steps import conv_piece, conv_token
from aioserve.runner.cpu.delta_steps import gated_delta
from aioserve.runner.cpu.gated_norms import with_own_norms
from aioserve.runner.cpu.mamba_steps import (
    selective_scan,
    selective_step,
    state_space_piece,
    state_space_token,
)

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
    """The forward pass of the class of `module` with our functions, or as it is where the kernels
    do not run.
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
    """What `own` returns; where that is None, as `own` cannot do it, what `reference` returns."""
    found = own(*args, **kwargs)
    return reference(*args, **kwargs) if found is None else found
