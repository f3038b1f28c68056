"""The gated delta rule by our kernels, under the arguments of `transformers`' functions.

Serves the function for one token and the one for a piece of a text: a kernel takes any number of
tokens, behind their states. Knows the arguments; the rule is in kernels/src/gated_delta.h.
"""

from typing import Any

import torch
from torch import Tensor

from aioserve.kernels.state_steps import MOST_NUMBERS, StateSteps
from aioserve.runner.cpu.state_tensors import fit, of_one_type, plain


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
