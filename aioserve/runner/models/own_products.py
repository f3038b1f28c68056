"""Products of a model that runs as `transformers` wrote it, by our kernels: its linear layers.

A layer keeps its place and its hooks, and gets another forward pass; weights are laid out anew, or
stay in the few bits that a file has them in. What reads a weight in another way than by such a pass
is left alone. Knows modules and products; knows nothing about steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError
from aioserve.model_source.quantized import attached, stands_in, unpack_all
from aioserve.model_source.quantized_modules import quantized_experts
from aioserve.runner.fused import Place
from aioserve.runner.fused.ops import Linear, Ops, PlainLinear


@contextmanager
def passed(module: nn.Module) -> Iterator[set[nn.Linear]]:
    """The linear layers of `module` that are called meanwhile."""
    found: set[nn.Linear] = set()

    def note(part: nn.Module, *_: Any) -> None:
        if type(part) is nn.Linear:
            found.add(part)

    handles = [
        part.register_forward_hook(note) for part in module.modules() if type(part) is nn.Linear
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def use_own_products(module: nn.Module, called: set[nn.Linear], ops: Ops) -> bool:
    """Give the layers of `module` that were `called`, but for its head, products of `ops`, and free
    their weights. Returns whether all that is quantized in layers is multiplied so, which experts
    are not.
    """
    outer = (module.get_input_embeddings(), module.get_output_embeddings())  # type: ignore[operator]
    shared = {id(part.weight) for part in outer if part is not None}
    for layer in module.modules():
        if layer not in called or id(layer.weight) in shared:
            continue
        assert isinstance(layer, nn.Linear)
        product = _product(layer, ops)
        if product is not None:
            layer.forward = _forward(product, layer.weight.dtype)  # type: ignore[method-assign]
            # A shape and a type without numbers: code that reads them raises, instead of computing.
            layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    return all(
        quantized_experts(p) is None and (attached(p) is None or id(p) in shared)
        for p in module.parameters()
    )


def _product(layer: nn.Linear, ops: Ops) -> Linear | None:
    bias = None if layer.bias is None else layer.bias.data
    stored = attached(layer.weight)
    if stored is not None:
        return ops.quantized_linear([stored], bias, layer.weight.dtype)
    product = ops.linear(layer.weight.data, bias)
    return None if isinstance(product, PlainLinear) else product


def _forward(product: Linear, dtype: torch.dtype) -> Any:
    def forward(x: Tensor) -> Tensor:
        assert x.dtype is dtype, "as torch has it"
        out = product(x.reshape(-1, x.shape[-1]).contiguous())
        return out.view(*x.shape[:-1], out.shape[-1])

    return forward


def unpack(module: nn.Module, place: Place) -> None:
    """Unpack weights that are still quantized. Raises `ConfigError` if memory is too little."""
    stored = [p for p in module.parameters() if stands_in(p)]
    needed, available = sum(p.numel() * p.itemsize for p in stored), place.available_memory()
    if available is not None and needed > available:
        raise ConfigError(
            f"too little memory: {needed / 2**20:,.0f} MiB for the weights of "
            f"{type(module).__name__} unpacked, as it is not fused; {available / 2**20:,.0f} MiB "
            "are available (model.dtype)"
        )
    unpack_all(module)
