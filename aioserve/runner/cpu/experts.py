"""Layers of experts by our own kernels: rows grouped by expert, one product for all rows of one.

Knows how the kernels want them; knows nothing about models.
"""

import ctypes
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from aioserve.kernels import ACTIVATIONS, ExpertsStruct, Kernels, PackedWeight
from aioserve.model_source.quantized_weight import QuantizedWeight
from aioserve.runner.cpu.products import BlockLinear, PanelLinear
from aioserve.runner.fused.ops import ExpertActivation, Experts, ExpertWeights, Router, Routes

_Linear: TypeAlias = PanelLinear | BlockLinear


class CompiledMixture:
    """Experts without a router: each weight in the layout of `PanelLinear`, or of `BlockLinear` if
    it is quantized.
    """

    def __init__(
        self,
        kernels: Kernels,
        activation: ExpertActivation,
        weights: Iterable[ExpertWeights],
        dtype: torch.dtype,
    ) -> None:
        """`serves` must be true of the activation; hidden and inner sizes are multiples of 16."""
        self._kernels = kernels
        self._gate_up: list[_Linear] = []
        self._down: list[_Linear] = []
        for own in weights:
            self._gate_up.append(_linear(kernels, own.gate_up, own.gate_up_bias, dtype))
            self._down.append(_linear(kernels, own.down, own.down_bias, dtype))
        hidden = self._gate_up[0].packed.inputs
        self.struct = ExpertsStruct(
            router=PackedWeight(None, None, hidden, len(self._down)),
            gate_up=_array(self._gate_up),
            down=_array(self._down),
            activation=ACTIVATIONS.index(activation.name or "clamped_swiglu"),
            alpha=activation.alpha,
            limit=activation.limit,
        )

    @property
    def products(self) -> list[_Linear]:
        """The products of all experts; after a change of one, `update` lets the kernels know."""
        return [*self._gate_up, *self._down]

    def update(self) -> None:
        """Give the kernels the products anew."""
        self.struct.gate_up, self.struct.down = _array(self._gate_up), _array(self._down)

    @staticmethod
    def serves(activation: ExpertActivation) -> bool:
        return activation.name is None or activation.name in ACTIVATIONS

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        self.struct.top_k = routes.chosen.shape[1]
        return self.mix(x, routes)

    def mix(self, x: Tensor, routes: Routes) -> Tensor:
        out = torch.empty_like(x)
        self._kernels.mix(self.struct, x, routes.chosen, routes.shares, out)
        return out


class CompiledExperts(CompiledMixture, Experts):
    """Experts and their router, which gives each of the rows to some of them."""

    def __init__(
        self,
        kernels: Kernels,
        router: Router,
        activation: ExpertActivation,
        weights: Iterable[ExpertWeights],
    ) -> None:
        super().__init__(kernels, activation, weights, router.weight.dtype)
        self._router = PanelLinear.of(kernels, router.weight, router.bias)
        self.struct.router, self.struct.top_k = self._router.packed, router.top_k
        self.struct.of_all = router.of_all

    def route(self, x: Tensor) -> Routes:
        chosen = torch.empty(len(x), self.struct.top_k, dtype=torch.int32)
        shares = torch.empty(len(x), self.struct.top_k)
        self._kernels.route(self.struct, x, chosen, shares)
        return Routes(chosen, shares)


def _linear(
    kernels: Kernels, weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> _Linear:
    if isinstance(weight, QuantizedWeight):
        return BlockLinear.of(kernels, [weight], bias, dtype)
    return PanelLinear.of(kernels, weight, bias)


def _array(linears: list[_Linear]) -> "ctypes.Array[PackedWeight]":
    return (PackedWeight * len(linears))(*(linear.packed for linear in linears))
