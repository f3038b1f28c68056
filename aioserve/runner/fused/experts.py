"""Finds the parts of a layer of experts in modules of `transformers`, by structure and numbers.

Such layers are a router, a linear layer whose largest logits choose, and experts, whose weights lie
in one tensor. What they add up to is for `proof` to show.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.model_source.quantized import QuantizedWeight, quantized_experts
from aioserve.runner.fused.ops import ExpertActivation, ExpertWeights, Router
from aioserve.runner.fused.structure import NotFusedError, expect, find_activation

_NUM_ROWS = 8  # of noise, by which a router is recognized


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedExperts:
    """The module with the weights of gated experts, and how they go."""

    experts: Any
    activation: ExpertActivation
    is_interleaved: bool  # whether gates and ups lie by turns

    @property
    def inner_size(self) -> int:
        return self._weight("down_proj", 0).shape[1]

    def weights(self) -> Iterator[ExpertWeights]:
        """The weights of the experts, one expert after the other."""
        for number in range(len(self.experts.down_proj)):
            bias = self._bias("gate_up_proj", number)
            yield ExpertWeights(
                self._gate_up(number),
                None if bias is None else self._gates_first(bias),
                self._weight("down_proj", number),
                self._bias("down_proj", number),
            )

    def _weight(self, name: str, number: int) -> Tensor | QuantizedWeight:
        """The weight `name` of expert `number`, [out, in]."""
        parameter: Tensor = getattr(self.experts, name)
        if (small := quantized_experts(parameter)) is not None:
            return small[number]
        weight = parameter.data[number]
        return weight.T if self.experts.is_transposed else weight

    def _bias(self, name: str, number: int) -> Tensor | None:
        biases = getattr(self.experts, f"{name}_bias", None)
        return None if biases is None else biases.data[number]

    def _gate_up(self, number: int) -> Tensor | QuantizedWeight:
        weight = self._weight("gate_up_proj", number)
        if isinstance(weight, Tensor):
            return self._gates_first(weight)
        return weight.rows(self._gates_first(torch.arange(weight.shape[0])))

    def _gates_first(self, rows: Tensor) -> Tensor:
        return torch.cat((rows[::2], rows[1::2])) if self.is_interleaved else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts(GatedExperts):
    """The modules of a layer of experts, its router included."""

    router_module: nn.Module
    router: Router


def gated_experts(experts: Any) -> GatedExperts:
    """How a module with the weights of gated experts goes. Raises `NotFusedError`."""
    activation, is_interleaved = _activation(experts)
    return GatedExperts(experts=experts, activation=activation, is_interleaved=is_interleaved)


def between(experts: Any) -> Callable[[Tensor], Tensor] | None:
    """What a module with the weights of experts computes between their two products."""
    name = "_apply_gate" if experts.has_gate else "act_fn"
    found: Callable[[Tensor], Tensor] | None = getattr(experts, name, None)
    return found


def find_experts(mlp: Any) -> ExpertParts:
    """The parts of a module that has experts. Raises `NotFusedError`."""
    name = "router" if hasattr(mlp, "router") else "gate"
    expect(mlp, {name, "experts"})
    router, experts = getattr(mlp, name), mlp.experts
    expect(router, {"weight"}, all_or_none={"bias"} if _has(router, "bias") else ())
    act_fn = {"act_fn"} if isinstance(getattr(experts, "act_fn", None), nn.Module) else set()
    expect(
        experts,
        {"gate_up_proj", "down_proj"} | act_fn,
        all_or_none={"gate_up_proj_bias", "down_proj_bias"},
    )
    if not hasattr(experts, "is_transposed") or getattr(experts, "has_post_expert_norm", False):
        raise NotFusedError(f"{type(experts).__name__} keeps its weights in a way of its own")
    activation, is_interleaved = _activation(experts)
    return ExpertParts(
        experts=experts,
        activation=activation,
        is_interleaved=is_interleaved,
        router_module=router,
        router=_router(router),
    )


def _has(module: nn.Module, name: str) -> bool:
    return getattr(module, name, None) is not None


def _router(module: Any) -> Router:
    """The router of a mixture of experts, recognized by its numbers. Raises `NotFusedError`."""
    weight, bias = module.weight.data, module.bias.data if _has(module, "bias") else None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_NUM_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    spread = F.linear(x, weight).float().std()
    if spread > 0:  # so that no share is all or nothing
        x = x / spread.to(x.dtype)
    name, rounding = type(module).__name__, 8 * torch.finfo(weight.dtype).eps
    try:
        _, found, chosen = module(x)
    except Exception as error:  # code of any kind of model
        raise NotFusedError(f"{name} gives other things than a router") from error
    logits = F.linear(x, weight, bias).float()
    top_k = chosen.shape[-1]
    if (
        not top_k
        or found.shape != chosen.shape
        or not torch.equal(
            logits.gather(1, chosen).sort(descending=True).values, logits.topk(top_k).values
        )
    ):
        raise NotFusedError(f"{name} does not choose the largest logits")
    of_chosen = logits.gather(1, chosen).softmax(-1)
    of_all = logits.softmax(-1).gather(1, chosen)
    for is_of_all, shares in ((False, of_chosen), (True, of_all)):
        if torch.allclose(found.float(), shares, rtol=rounding, atol=rounding):
            return Router(weight, bias, top_k, is_of_all)
    raise NotFusedError(f"{name} gives other shares than a softmax")


def _activation(experts: Any) -> tuple[ExpertActivation, bool]:
    """The activation, by its numbers; whether gates and ups take turns. Else `NotFusedError`."""
    if not hasattr(experts, "_apply_gate"):  # a private name of `transformers`
        raise NotFusedError(f"{type(experts).__name__} has no _apply_gate")
    gates, ups = torch.linspace(-12, 12, 96), torch.linspace(11, -10, 96)
    halves, turns = torch.cat((gates, ups))[None], torch.stack((gates, ups), dim=1).view(1, -1)
    if hasattr(experts, "limit") and hasattr(experts, "alpha"):
        alpha, limit = float(experts.alpha), float(experts.limit)
        gate, up = gates.clamp(max=limit), ups.clamp(-limit, limit)
        expected = gate * torch.sigmoid(gate * alpha) * (up + 1)
        if torch.allclose(experts._apply_gate(turns)[0], expected, rtol=1e-5, atol=1e-6):
            return ExpertActivation(None, alpha, limit), True
    elif hasattr(experts, "act_fn"):
        name = find_activation(experts.act_fn)
        if name is not None:
            plain = experts.act_fn(gates) * ups
            if torch.allclose(experts._apply_gate(halves)[0], plain, rtol=1e-5, atol=1e-6):
                return ExpertActivation(name), False
    raise NotFusedError(f"the activation of {type(experts).__name__} is not served")
