"""Layers of experts by our own kernels: rows grouped by expert, one product for all rows of one.

Knows how the kernels want them; knows nothing about models.
"""

import ctypes
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from aioserve.kernels import Kernels
from aioserve.kernels.structs import ACTIVATIONS, ExpertsStruct, PackedWeight
from aioserve.model_source.quantized import QuantizedWeight
from aioserve.runner.cpu.blocks import BlockLinear
from aioserve.runner.cpu.panels import PanelLinear
from aioserve.runner.fused.ops import (
    ExpertActivation,
    Experts,
    ExpertWeights,
    Router,
    Routes,
)

_Linear: TypeAlias = PanelLinear | BlockLinear


class CompiledExperts(Experts):
    """Each weight in the layout of `PanelLinear`, or of `BlockLinear` if it is quantized."""

    def __init__(
        self,
        kernels: Kernels,
        router: Router,
        activation: ExpertActivation,
        weights: Iterable[ExpertWeights],
    ) -> None:
        """`serves` must be true of the activation; hidden and inner sizes are multiples of 16."""
        self._kernels, self._top_k = kernels, router.top_k
        self._router = PanelLinear.of(kernels, router.weight, router.bias)
        self._gate_up: list[_Linear] = []
        self._down: list[_Linear] = []
        dtype = router.weight.dtype
        for own in weights:
            self._gate_up.append(_linear(kernels, own.gate_up, own.gate_up_bias, dtype))
            self._down.append(_linear(kernels, own.down, own.down_bias, dtype))
        self.struct = ExpertsStruct(
            router=self._router.packed,
            gate_up=_array(self._gate_up),
            down=_array(self._down),
            top_k=router.top_k,
            of_all=router.of_all,
            activation=ACTIVATIONS.index(activation.name or "clamped_swiglu"),
            alpha=activation.alpha,
            limit=activation.limit,
        )

    @property
    def products(self) -> list[PanelLinear | BlockLinear]:
        """The products of all experts; after a change of one, `update` lets the kernels know."""
        return [*self._gate_up, *self._down]

    def update(self) -> None:
        """Give the kernels the products anew."""
        self.struct.gate_up, self.struct.down = _array(self._gate_up), _array(self._down)

    @staticmethod
    def serves(activation: ExpertActivation) -> bool:
        return activation.name is None or activation.name in ACTIVATIONS

    def route(self, x: Tensor) -> Routes:
        chosen = torch.empty(len(x), self._top_k, dtype=torch.int32)
        shares = torch.empty(len(x), self._top_k)
        self._kernels.route(self.struct, x, chosen, shares)
        return Routes(chosen, shares)

    def mix(self, x: Tensor, routes: Routes) -> Tensor:
        out = torch.empty_like(x)
        self._kernels.mix(self.struct, x, routes.chosen, routes.shares, out)
        return out


def _linear(
    kernels: Kernels, weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> _Linear:
    if isinstance(weight, QuantizedWeight):
        return BlockLinear.of(kernels, [weight], bias, dtype)
    return PanelLinear.of(kernels, weight, bias)


def _array(linears: list[_Linear]) -> "ctypes.Array[PackedWeight]":
    return (PackedWeight * len(linears))(*(linear.packed for linear in linears))
