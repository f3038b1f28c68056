"""Quantized experts of a model that runs as `transformers` wrote it, multiplied by our kernels.

A module that has the weights of a layer's experts keeps its place and gets another forward pass, if
both give the same. Knows such modules and products; knows nothing about routers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.model_source.quantized import quantized_experts, unpacked, weights_of_experts
from aioserve.runner.fused import NotFusedError
from aioserve.runner.fused.experts import between, gated_experts
from aioserve.runner.fused.ops import Linear, Mixture, Ops, Routes

_MULTIPLE = 16  # numbers in a row, which kernels for all experts want
_NUM_ROWS = 8  # of noise, on which both are compared
#: How far they may be from each other, as a share: rounding, of two-byte types in each product.
_TOLERANCE = {torch.float32: 1e-4}
_TOLERANCE_OF_HALVES = 0.03


class EachExpert:
    """One expert after the other, by its module: any activation, with gates or without."""

    def __init__(
        self, module: Any, activate: Linear, ups: list[Linear], downs: list[Linear]
    ) -> None:
        """`activate` makes of what `ups` give for rows what `downs` take."""
        self._activate, self._ups, self._downs = activate, ups, downs
        self._norm = module.post_expert_norm if module.has_post_expert_norm else None

    @property
    def products(self) -> list[Linear]:
        """The products of all experts."""
        return [*self._ups, *self._downs]

    def update(self) -> None:
        pass  # they are called anew each time

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in sorted(set(routes.chosen.flatten().tolist())):
            rows, places = torch.where(routes.chosen == expert)
            made = self._downs[expert](self._activate(self._ups[expert](x[rows])).contiguous())
            if self._norm is not None:
                made = self._norm(made)
            out.index_add_(0, rows, made.float() * routes.shares[rows, places, None])
        return out.to(x.dtype)


@torch.inference_mode()
def use_own_experts(module: nn.Module, ops: Ops) -> list[Mixture]:
    """Give the experts in `module` that are quantized products of `ops`, and free their numbers;
    but for those that our products compute otherwise.
    """
    found = []
    for part in module.modules():
        names = weights_of_experts(part)
        if all(quantized_experts(getattr(part, name)) is None for name in names):
            continue  # also where there are no names
        mixture = _mixture(part, names, ops)
        if mixture is None or not _is_same(part, mixture):
            continue
        part.forward = _forward(mixture)
        for name in names:
            setattr(part, name, nn.Parameter(getattr(part, name).to("meta"), False))
        found.append(mixture)
    return found


def _mixture(part: Any, names: tuple[str, ...], ops: Ops) -> Mixture | None:
    dtype = part.down_proj.dtype
    is_wide = all(size % _MULTIPLE == 0 for size in part.down_proj.shape[1:])
    if part.has_gate and not part.has_post_expert_norm and is_wide:
        try:
            gated = gated_experts(part)
        except NotFusedError:
            pass
        else:
            mixture = ops.mixture(gated.activation, gated.weights(), dtype)
            if mixture is not None:
                return mixture
    activate = between(part)
    ups, downs = (_products(part, name, ops) for name in names)
    if activate is None or None in (*ups, *downs):
        return None
    return EachExpert(part, activate, ups, downs)


def _products(part: Any, name: str, ops: Ops) -> list[Any]:
    weights: Tensor = getattr(part, name)
    few, biases = quantized_experts(weights), getattr(part, f"{name}_bias", None)
    products = []
    for expert, weight in enumerate(weights.data):
        bias = None if biases is None else biases.data[expert]
        if few is not None:
            products.append(ops.quantized_linear([few[expert]], bias, weight.dtype))
        else:
            own = weight.T if part.is_transposed else weight
            products.append(ops.linear(own.contiguous(), bias))
    return products


def _forward(mixture: Mixture) -> Callable[..., Tensor]:
    def forward(hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        routes = Routes(chosen.to(torch.int32).contiguous(), shares.float().contiguous())
        return mixture(hidden.contiguous(), routes)

    return forward


def _by_module(part: Any, *inputs: Tensor) -> Tensor:
    """What the module itself computes, without its hooks, from the numbers of its weights."""
    kept = {name: getattr(part, name) for name in weights_of_experts(part)}
    try:
        for name, parameter in kept.items():
            setattr(part, name, nn.Parameter(unpacked(parameter), requires_grad=False))
        out: Tensor = part.forward(*inputs)
    finally:
        for name, parameter in kept.items():
            setattr(part, name, parameter)
    return out


def _is_same(part: Any, mixture: Mixture) -> bool:
    """Whether the module gives what `mixture` does, of noise."""
    num_experts, dtype = len(part.down_proj), part.down_proj.dtype
    hidden = part.down_proj.shape[2 if part.is_transposed else 1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_NUM_ROWS, hidden, generator=generator).to(dtype)
    scores = torch.rand(_NUM_ROWS, num_experts, generator=generator)
    shares, chosen = scores.topk(min(2, num_experts))
    expected = _by_module(part, x, chosen, shares.to(dtype)).float()
    found = _forward(mixture)(x, chosen, shares.to(dtype)).float()
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_OF_HALVES)
    return bool((found - expected).norm() <= tolerance * expected.norm())
