"""Leaves a module of `transformers` the weights of one rank; for the rest it asks the others.

Knows linear layers and what plans call them; knows nothing about attention or steps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError
from aioserve.runner.tensor_parallel.group import Ranks
from aioserve.runner.tensor_parallel.plan import plan_of


@torch.no_grad()
def shard(module: nn.Module, ranks: Ranks, dtype: torch.dtype) -> None:
    """Keep of a causal language model what `ranks` says, as `dtype`. Raises `ConfigError`.

    The head is shared by tokens: it is as wide as all layers of a small model together. Its logits
    are whole on the first rank, which samples, and zeros elsewhere.
    """
    head = module.get_output_embeddings()  # type: ignore[operator]
    parts: dict[str, Any] = dict(module.named_modules())
    for name, style in plan_of(module).items():
        part = parts[name]
        if type(part) is not nn.Linear:
            raise ConfigError(f"the plan shares {name}, which is a {type(part).__name__}")
        _SHARES[style](name, part, ranks, part is head)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _columns(name: str, part: nn.Linear, ranks: Ranks, is_head: bool) -> None:
    """Keep this rank's share of a linear layer's outputs: rows of its weight and bias."""
    _check(name, part.out_features, ranks)
    own = ranks.share(part.out_features)
    _keep(part, part.weight[own], None if part.bias is None else part.bias[own])


def _joined_columns(name: str, part: nn.Linear, ranks: Ranks, is_head: bool) -> None:
    """Some of the outputs, and those of the others are fetched."""
    width = part.out_features
    if not is_head:
        _columns(name, part, ranks, is_head)
        part.register_forward_hook(_hook(ranks.join))
        return
    if getattr(part, "bias", None) is not None:
        raise ConfigError(f"{name} has biases, which are not served with ranks")
    count = -(-width // ranks.size)  # the last ones may have some zeros
    own = slice(min(ranks.rank * count, width), min((ranks.rank + 1) * count, width))
    rows = part.weight[own]
    _keep(part, torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[1])]), None)
    part.register_forward_hook(_hook(lambda out: ranks.join_at_first(out, width)))


def _rows(name: str, part: nn.Linear, ranks: Ranks, is_head: bool) -> None:
    """Some of the inputs, which is what the layer before has made; sums are added up."""
    _check(name, part.in_features, ranks)
    bias: Tensor | None = part.bias
    if bias is not None and not ranks.is_first:
        bias = torch.zeros_like(bias)  # it is added once
    _keep(part, part.weight[:, ranks.share(part.in_features)], bias)

    def add_up(out: Tensor) -> Tensor:
        ranks.add_up(out)
        return out

    part.register_forward_hook(_hook(add_up))


def _split_rows(name: str, part: nn.Linear, ranks: Ranks, is_head: bool) -> None:
    """The same, where the inputs are whole."""
    own = ranks.share(part.in_features)
    _rows(name, part, ranks, is_head)
    part.register_forward_pre_hook(lambda _, arguments: (arguments[0][..., own],))


_SHARES: dict[str, Callable[[str, nn.Linear, Ranks, bool], None]] = {
    "colwise": _columns,
    "colwise_gather_output": _joined_columns,
    "rowwise": _rows,
    "rowwise_split_input": _split_rows,
}


def _hook(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def changed(_: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> Tensor:
        return change(out)

    return changed


def _keep(part: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Copies: the file that the whole is mapped to can go, and what is tied to it stays whole."""
    part.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format), False)
    part.out_features, part.in_features = weight.shape
    if bias is not None:
        part.bias = nn.Parameter(bias.clone(), False)


def _check(name: str, count: int, ranks: Ranks) -> None:
    if count % ranks.size:
        raise ConfigError(
            f"runner.tensor_parallel_size is {ranks.size}, but {name} has {count} numbers to share"
        )
