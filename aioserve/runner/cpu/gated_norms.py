"""Gated norms of layers with states by our kernel, in the place of a dozen passes of torch.

Architectures differ in whether the gate stands before or behind the norm, and in how many numbers
are normed together. Which of these a module does is found by its own code, on numbers at random.
"""

import copy
import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aioserve.kernels.state_steps import ELEMENTS, MULTIPLE, load_state_steps

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
    """A class whose modules, copies of them too, compute `norm` by the kernel."""

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
    """What the module computes, if it is what the kernel does."""
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
