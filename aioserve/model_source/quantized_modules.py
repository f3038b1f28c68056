"""Quantizes matrices of a module of `transformers` that lies in memory as numbers.

For what is not read weight by weight: the text of a vision model, whose files name it in ways of
their own, and experts, which `transformers` puts together from several weights. Knows modules;
knows no file.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError
from aioserve.model_source.quantized import (
    QuantizedWeight,
    attach,
    attached,
    format_of,
    quantize,
    stand_in,
)
from aioserve.model_source.source import Rounding

#: Parts of names of linear layers that keep their numbers: routers, and what decides how fast
#: states fade; they are small, and what they are off by is felt for long.
_KEPT = {"dt_proj", "in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj"}
_ROUTERS = {"gate", "router", "modality_router", "classifier", "wg", "shared_expert_gate"}


def keeps_numbers(name: str) -> bool:
    """Whether the linear layer of this name, or its weight, is not to be quantized."""
    return not (_KEPT | _ROUTERS).isdisjoint(name.split("."))


def weights_of_experts(module: nn.Module) -> tuple[str, ...]:
    """The names of the weights [experts, ...] of a layer's experts, first and second product, where
    `module` has them as `transformers` has most; else none.
    """
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    found = (getattr(module, name, None) for name in names)
    return names if all(isinstance(one, Tensor) and one.dim() == 3 for one in found) else ()


@torch.no_grad()
def quantize_linears(module: Any, rounding: Rounding) -> None:
    """Have embedding and linear layers of a causal language model, if they are not quantized yet,
    stand in for the same in few bits, and free their numbers. Raises `ConfigError` for a layer that
    does not fit the groups.
    """
    outer = (module.get_input_embeddings(), module.get_output_embeddings())
    made: dict[int, nn.Parameter] = {}  # one for what is tied
    for name, part in module.named_modules():
        is_outer = part in outer
        if type(part) not in ((nn.Linear, nn.Embedding) if is_outer else (nn.Linear,)):
            continue  # embeddings of positions, too
        if keeps_numbers(name):
            continue
        kind = rounding.outer if is_outer else rounding.inner
        weight = part.weight
        if attached(weight) is not None or not _fits(name, weight.shape[1], kind):
            continue
        if id(weight) not in made:
            small = quantize(weight.data, kind)
            made[id(weight)] = nn.Parameter(stand_in(small.shape, weight.dtype), False)
            attach(made[id(weight)], small)
        part.weight = made[id(weight)]


@torch.no_grad()
def quantize_experts(module: nn.Module, kind: str) -> None:
    """Quantize the experts of a causal language model; their parameters keep the rounded numbers,
    and `quantized_experts` tells the same in few bits. Raises `ConfigError` as `quantize_linears`.
    """
    for name, part in module.named_modules():
        for own in weights_of_experts(part):
            weight, is_transposed = getattr(part, own), bool(part.is_transposed)
            if _fits(f"{name}.{own}", weight.shape[1 if is_transposed else 2], kind):
                small = list(_quantized_each(weight.data, kind, is_transposed))
                weight.quantized_experts = small


def has_quantized_layers(module: Any) -> bool:
    """Whether anything but embedding and head of a causal language model is quantized."""
    outer = (module.get_input_embeddings(), module.get_output_embeddings())
    shared = {id(part.weight) for part in outer if part is not None}
    return any(
        id(p) not in shared and (attached(p) or quantized_experts(p)) for p in module.parameters()
    )


def told_of_weights(module: nn.Module) -> tuple[str, int]:
    """The formats of all quantized weights of `module`, in words, and their bytes."""
    stored: dict[int, QuantizedWeight] = {}  # one for what is tied
    for parameter in module.parameters():
        own = [attached(parameter), *(quantized_experts(parameter) or ())]
        stored |= {id(weight): weight for weight in own if weight is not None}
    kinds = sorted({weight.kind for weight in stored.values()})
    return ", ".join(kinds), sum(weight.data.numel() for weight in stored.values())


def quantized_experts(parameter: Tensor) -> list[QuantizedWeight] | None:
    """The weights [out, in] of each expert in few bits, if they were rounded to these."""
    return getattr(parameter, "quantized_experts", None)


def _quantized_each(weight: Tensor, kind: str, is_transposed: bool) -> Iterator[QuantizedWeight]:
    for numbers in weight:
        own = numbers.T if is_transposed else numbers
        small = quantize(own.contiguous(), kind)
        own.copy_(small.dequantize(own.dtype))
        yield small


def _fits(name: str, num_inputs: int, kind: str) -> bool:
    """Whether inputs are whole groups; those of 32 leave alone what does not fit."""
    group = format_of(kind).inputs
    if num_inputs % group and group > 32:
        raise ConfigError(
            f"model.quantization_group_size is {group}, but {name} has {num_inputs} inputs, which "
            "is no multiple"
        )
    return num_inputs % group == 0
