"""Products of a model that runs as `transformers` wrote it, by our kernels: its linear layers.

A layer keeps its place and its hooks, and gets another forward pass; weights are laid out anew, or
stay in the few bits that a file has them in. What reads a weight in another way than by such a pass
is left alone. Knows modules and products; knows nothing about steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aioserve.errors import ConfigError
from aioserve.model_source.quantized_weight import (
    attached,
    quantized_experts,
    stands_in,
    unpack_all,
    unpacked,
    weights_of_experts,
)
from aioserve.runner.fused.decoder import LOGITS_DTYPE, Place
from aioserve.runner.fused.ops import (
    Embedding,
    Linear,
    Mixture,
    NotFusedError,
    Ops,
    PlainLinear,
    Routes,
    WideLinear,
)
from aioserve.runner.fused.recognize import between, gated_experts


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


def use_own_products(module: nn.Module, called: set[nn.Linear], ops: Ops) -> list[Linear | Mixture]:
    """Give the layers of `module` that were `called` products of `ops`, and free their weights; its
    embedding, head and experts where they are quantized. Returns what computes now. `widen_head`
    follows.
    """
    own: list[Linear | Mixture] = []
    outer = (module.get_input_embeddings(), module.get_output_embeddings())  # type: ignore[operator]
    shared = {id(part.weight) for part in outer if part is not None}
    for layer in module.modules():
        if layer not in called or id(layer.weight) in shared or layer.weight.is_meta:
            continue
        assert isinstance(layer, nn.Linear)
        product = _product(layer, ops)
        if product is not None:
            own.append(product)
            layer.forward = _product_forward(product, layer.weight.dtype)  # type: ignore[method-assign]
            # A shape and a type without numbers: code that reads them raises, instead of computing.
            layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    return [*own, *_own_outer(*outer, ops), *use_own_experts(module, ops)]


def are_stored(module: nn.Module) -> bool:
    """Return whether our kernels have taken all layers that are quantized, so that none is
    unpacked.
    """
    outer = (module.get_input_embeddings(), module.get_output_embeddings())  # type: ignore[operator]
    shared = {id(part.weight) for part in outer if part is not None}
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


def _product_forward(product: Linear, dtype: torch.dtype) -> Any:
    def forward(x: Tensor) -> Tensor:
        assert x.dtype is dtype, "as torch has it"
        out = product(x.reshape(-1, x.shape[-1]).contiguous())
        return out.view(*x.shape[:-1], out.shape[-1])

    return forward


def _own_outer(embedding: Any, head: Any, ops: Ops) -> list[Linear]:
    """Have embedding and head read their quantized weights as these are. Returns the products."""
    products: list[Linear] = []
    made: Linear | None = None
    table = embedding.weight if type(embedding) is nn.Embedding else None
    if type(head) is nn.Linear and (stored := attached(head.weight)) is not None:
        bias = None if head.bias is None else head.bias.data
        made = ops.quantized_linear([stored], bias, head.weight.dtype, LOGITS_DTYPE)
    if made is not None:
        products.append(made)
        head.forward = _logits(made)
    if table is not None and (stored := attached(table)) is not None:
        is_tied = made is not None and head.weight is table
        rows = made if is_tied else ops.quantized_linear([stored], None, table.dtype)
        own = None if rows is None else ops.quantized_embedding(rows, table.dtype)
        if own is not None:
            embedding.forward = _lookup(own)
            embedding.weight = _without_numbers(table)
    if made is not None:
        head.weight = _without_numbers(head.weight)
    return products


def _lookup(own: Embedding) -> Callable[[Tensor], Tensor]:
    def forward(ids: Tensor) -> Tensor:
        return own(ids.reshape(-1).contiguous()).view(*ids.shape, -1)

    return forward


def _without_numbers(weight: Tensor) -> nn.Parameter:
    """Return a weight without memory on the same device, which models ask of their embedding."""
    return nn.Parameter(weight.new_full((1, 1), torch.nan).expand(weight.shape), False)


def widen_head(module: nn.Module, ops: Ops | None = None) -> None:
    """Let the head of `module` write logits in float32, not rounded to the type of its weight.

    `ops` may copy a weight that is tied to the embedding: `num_weight_bytes` counts the copy. A
    head of another class than `nn.Linear`, or one that is quantized, stays as it is.
    """
    head = module.get_output_embeddings()  # type: ignore[operator]
    is_done = type(head) is not nn.Linear or "forward" in vars(head)
    if is_done or head.weight.dtype is LOGITS_DTYPE:
        return
    weight, bias = head.weight.data, None if head.bias is None else head.bias.data
    is_tied = head.weight is getattr(module.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    if ops is not None and is_tied:
        wide = ops.linear(weight, bias, LOGITS_DTYPE)
    else:
        wide = WideLinear(weight, bias)
    head.forward = _logits(wide)


def _logits(wide: Linear) -> Callable[[Tensor], Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        logits = wide(hidden.reshape(-1, hidden.shape[-1]).contiguous())
        return logits.view(*hidden.shape[:-1], logits.shape[-1])  # of no rows, too

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


# Quantized experts of a model that runs as `transformers` wrote it, multiplied by our kernels. A
# module that has the weights of a layer's experts keeps its place and gets another forward pass, if
# both give the same. Knows such modules and products; knows nothing about routers.


_MULTIPLE = 16  # numbers in a row, which kernels for all experts want
_ALIGNMENT = 16  # bytes, of rows that torch multiplies with several experts in one call
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


def keep_experts_apart(module: nn.Module) -> None:
    """Have `transformers` multiply one expert after the other in the models within `module` that
    have an expert whose rows are not of whole 16 bytes: torch's product of all of them at once
    refuses those.
    """
    for model in module.modules():
        if isinstance(model, PreTrainedModel) and any(map(_is_odd, model.modules())):
            model.set_experts_implementation("eager")


def _is_odd(part: nn.Module) -> bool:
    weights = [getattr(part, name) for name in weights_of_experts(part)]
    return any(
        size * weight.element_size() % _ALIGNMENT for weight in weights for size in weight.shape[1:]
    )


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
    """Return what the module itself computes, without its hooks, from the numbers of its
    weights.
    """
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
    """Return whether the module gives what `mixture` does, of noise."""
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
