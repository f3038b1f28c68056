"""Leaves a module of `transformers` the weights of one rank; for the rest it asks the others.

Knows linear layers and what plans call them; knows nothing about attention or steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError
from aioserve.runner.tensor_parallel.group import Ranks
from aioserve.runner.tensor_parallel.plan import EXPERTS, plan_of, vectors_of


class Share(NamedTuple):
    """What this rank has of a linear layer."""

    num_outputs: int  # of the layer, on all ranks
    num_inputs: int
    outputs: slice = slice(None)  # those that are here
    inputs: slice = slice(None)


def share_of(part: nn.Linear) -> Share:
    """Which part of a linear layer is here: all of it, unless `shard` has left some."""
    found: Share | None = getattr(part, "share_of_rank", None)
    return Share(part.out_features, part.in_features) if found is None else found


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
        if type(part) is not nn.Linear and style != EXPERTS:
            raise ConfigError(f"the plan shares {name}, which is a {type(part).__name__}")
        _SHARES[style](name, part, ranks, part is head)
    for name in vectors_of(module):
        vector = module.get_parameter(name)
        _check(name, len(vector), ranks)
        vector.data = vector.data[ranks.share(len(vector))].clone()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _columns(name: str, part: nn.Linear, ranks: Ranks, is_head: bool) -> None:
    """Keep this rank's share of a linear layer's outputs: rows of its weight and bias."""
    _check(name, part.out_features, ranks)
    own = ranks.share(part.out_features)
    share = Share(part.out_features, part.in_features, outputs=own)
    _keep(part, part.weight[own], None if part.bias is None else part.bias[own], share)


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
    own = ranks.padded_share(width)
    rows, share = part.weight[own], Share(width, part.in_features, outputs=own)
    _keep(part, torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[1])]), None, share)
    part.register_forward_hook(_hook(lambda out: ranks.join_at_first(out, width)))


def _rows(name: str, part: nn.Linear, ranks: Ranks, is_head: bool) -> None:
    """Some of the inputs, which is what the layer before has made; sums are added up."""
    _check(name, part.in_features, ranks)
    bias: Tensor | None = part.bias
    if bias is not None and not ranks.is_first:
        bias = torch.zeros_like(bias)  # it is added once
    own = ranks.share(part.in_features)
    _keep(part, part.weight[:, own], bias, Share(part.out_features, part.in_features, inputs=own))
    part.register_forward_hook(_hook(_adding_up(ranks)))


def _split_rows(name: str, part: nn.Linear, ranks: Ranks, is_head: bool) -> None:
    """The same, where the inputs are whole."""
    own = ranks.share(part.in_features)
    _rows(name, part, ranks, is_head)
    part.register_forward_pre_hook(lambda _, arguments: (arguments[0][..., own],))


def _experts(name: str, part: Any, ranks: Ranks, is_head: bool) -> None:
    """Some of the numbers inside of each expert: its gates and ups, and what is made of them."""
    gate_up: Tensor | None = getattr(part, "gate_up_proj", None)
    down: Tensor | None = getattr(part, "down_proj", None)
    is_plain = getattr(part, "is_concatenated", True) and not any(
        getattr(part, way, False) for way in ("is_transposed", "has_bias")
    )
    if gate_up is None or down is None or not is_plain:
        raise ConfigError(f"the plan shares {name}, whose experts lie in a way of their own")
    inner = down.shape[2]
    _check(name, inner, ranks)
    own = ranks.share(inner)
    halves = gate_up.detach().view(len(gate_up), 2, inner, -1)
    part.gate_up_proj = nn.Parameter(halves[:, :, own].flatten(1, 2).clone(), False)
    part.down_proj = nn.Parameter(_copied(down.detach()[:, :, own]), False)
    part.register_forward_hook(_hook(_adding_up(ranks)))


def _adding_up(ranks: Ranks) -> Callable[[Tensor], Tensor]:
    def add_up(out: Tensor) -> Tensor:
        ranks.add_up(out)
        return out

    return add_up


_SHARES: dict[str, Callable[[str, Any, Ranks, bool], None]] = {
    "colwise": _columns,
    "colwise_gather_output": _joined_columns,
    "rowwise": _rows,
    "rowwise_split_input": _split_rows,
    EXPERTS: _experts,
}


def _hook(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def changed(_: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> Tensor:
        return change(out)

    return changed


def _keep(part: Any, weight: Tensor, bias: Tensor | None, share: Share) -> None:
    """Copies: the file that the whole is mapped to can go, and what is tied to it stays whole."""
    part.weight = nn.Parameter(_copied(weight), False)
    part.out_features, part.in_features = weight.shape
    part.share_of_rank = share
    if bias is not None:
        part.bias = nn.Parameter(bias.clone(), False)


def _copied(weight: Tensor) -> Tensor:
    return weight.clone(memory_format=torch.contiguous_format)


def _check(name: str, count: int, ranks: Ranks) -> None:
    if count % ranks.size:
        raise ConfigError(
            f"runner.tensor_parallel_size is {ranks.size}, but {name} has {count} numbers to share"
        )
