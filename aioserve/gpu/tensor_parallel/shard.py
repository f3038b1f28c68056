"""Leaves a module of `transformers` the weights of one rank; for the rest it asks the others.

Begins with whether groups of quantized weights can be shared out: told from the headers of files
and an outline of the model, before any weight is read.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from aioserve.errors import ConfigError
from aioserve.features.quantized import check_whole_groups
from aioserve.gpu.tensor_parallel.plan import EXPERTS, plan_of, vectors_of
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.quantized_weight import (
    QuantizedWeight,
    attach,
    attached,
    quantized_experts,
    stand_in,
    stored_experts,
)
from aioserve.runner.ranks import Ranks

_BY_INPUTS = ("rowwise", "rowwise_split_input", EXPERTS)


def check_groups(info: ModelInfo, num_ranks: int) -> None:
    """Raise `ConfigError` that names a layer of whose inputs a rank would get a part of a group, in
    files of quantized weights.
    """
    config: Any = copy.deepcopy(info.whole_config)
    for part in (config, config.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)  # `transformers` would want its readers
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(
            config, trust_remote_code=info.config.trust_remote_code
        )
    kinds = info.source.stored_kinds(outline)
    for name, style in plan_of(outline).items():
        if style not in _BY_INPUTS:
            continue
        own = "down_proj" if style == EXPERTS else "weight"
        kind = kinds.get(f"{name}.{own}")
        if kind is None:
            continue
        part = outline.get_submodule(name)
        is_transposed = style == EXPERTS and getattr(part, "is_transposed", False)
        count = getattr(part, own).shape[-2 if is_transposed else -1]
        check_whole_groups(name, kind, count, slice(0, count // num_ranks))


# Leaves a module of `transformers` the weights of one rank; for the rest it asks the others. Knows
# linear layers and what plans call them; knows nothing about attention or steps.


class Share(NamedTuple):
    """The share that this rank has of a linear layer."""

    num_outputs: int  # of the layer, on all ranks
    num_inputs: int
    outputs: slice = slice(None)  # those that are here
    inputs: slice = slice(None)


def share_of(part: nn.Linear) -> Share:
    """Return which part of a linear layer is here: all of it, unless `shard` has left some."""
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
    bias = None if part.bias is None else part.bias[own]
    _keep(part, _some_rows(part.weight, own), bias, share)


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
    share = Share(width, part.in_features, outputs=own)
    _keep(part, _some_rows(part.weight, own, count), None, share)
    part.register_forward_hook(_hook(lambda out: ranks.join_at_first(out, width)))


def _rows(name: str, part: nn.Linear, ranks: Ranks, is_head: bool) -> None:
    """Some of the inputs, which is what the layer before has made; sums are added up."""
    _check(name, part.in_features, ranks)
    bias: Tensor | None = part.bias
    if bias is not None and not ranks.is_first:
        bias = torch.zeros_like(bias)  # it is added once
    own = ranks.share(part.in_features)
    share = Share(part.out_features, part.in_features, inputs=own)
    _keep(part, _some_columns(name, part.weight, own), bias, share)
    part.register_forward_hook(_hook(_adding_up(ranks)))


def _split_rows(name: str, part: nn.Linear, ranks: Ranks, is_head: bool) -> None:
    """Split the rows of a layer whose inputs are whole."""
    own = ranks.share(part.in_features)
    _rows(name, part, ranks, is_head)
    part.register_forward_pre_hook(lambda _, arguments: (arguments[0][..., own],))


def _experts(name: str, part: Any, ranks: Ranks, is_head: bool) -> None:
    """Some of the numbers inside of each expert: its gates and ups, and what is made of them."""
    gate_up: Tensor | None = getattr(part, "gate_up_proj", None)
    down: Tensor | None = getattr(part, "down_proj", None)
    if gate_up is None or down is None:
        raise ConfigError(f"the plan shares {name}, whose experts lie in a way of their own")
    is_transposed = gate_up.shape[2] == 2 * down.shape[1]  # [E, hidden, 2 * inner]
    wide, narrow = (2, 1) if is_transposed else (1, 2)  # of their dimensions
    inner = down.shape[narrow]
    _check(name, inner, ranks)
    own = ranks.share(inner)
    halves = torch.arange(2 * inner).view(2, inner)[:, own]
    turns = torch.arange(2 * inner).view(inner, 2)[own]
    rows = (halves if getattr(part, "is_concatenated", True) else turns).flatten()
    part.gate_up_proj = _some_experts(
        gate_up, lambda whole: whole.index_select(wide, rows), lambda one: one.rows(rows)
    )
    part.down_proj = _some_experts(
        down,
        lambda whole: _copied(whole.narrow(narrow, own.start, own.stop - own.start)),
        lambda one: _columns_of_blocks(name, one, own),
    )
    if getattr(part, "has_bias", False):
        part.gate_up_proj_bias = nn.Parameter(part.gate_up_proj_bias.detach()[:, rows], False)
        if not ranks.is_first:  # it is added once
            part.down_proj_bias = nn.Parameter(torch.zeros_like(part.down_proj_bias), False)
    part.register_forward_hook(_hook(_adding_up(ranks)))


def _some_experts(
    weights: Tensor,
    cut: Callable[[Tensor], Tensor],
    cut_one: Callable[[QuantizedWeight], QuantizedWeight],
) -> nn.Parameter:
    """Return a part of the weights of all experts, quantized or not: of numbers, and of each in
    blocks.
    """
    if (stored := stored_experts(weights)) is not None:
        few = stored._replace(weights=[cut_one(one) for one in stored.weights])
        return few.stand_in(few.matrix(weights.dtype))
    part = nn.Parameter(cut(weights.detach()), False)
    if (small := quantized_experts(weights)) is not None:
        part.quantized_experts = [cut_one(one) for one in small]  # type: ignore[attr-defined]
    return part


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


def _some_rows(weight: Tensor, own: slice, count: int | None = None) -> nn.Parameter:
    """Return these rows of a weight, quantized or not, and zeros behind them, `count` rows in
    all.
    """
    small = attached(weight)
    rows = weight[own] if small is None else small.data[own]
    missing = 0 if count is None else count - len(rows)
    copied = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    if small is None:
        return nn.Parameter(copied, False)
    return _standing_in(QuantizedWeight(small.kind, copied, small.format), weight.dtype)


def _some_columns(name: str, weight: Tensor, own: slice) -> nn.Parameter:
    """Return these columns of a weight. Raises `ConfigError` if they are not whole groups of one
    that is quantized.
    """
    if (small := attached(weight)) is None:
        return nn.Parameter(_copied(weight[:, own]), False)
    return _standing_in(_columns_of_blocks(name, small, own), weight.dtype)


def _columns_of_blocks(name: str, small: QuantizedWeight, own: slice) -> QuantizedWeight:
    check_whole_groups(name, small.kind, small.shape[1], own)
    group, num_bytes, _ = small.format
    columns = slice(own.start // group * num_bytes, own.stop // group * num_bytes)
    return QuantizedWeight(small.kind, _copied(small.data[:, columns]), small.format)


def _standing_in(small: QuantizedWeight, dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(stand_in(small.shape, dtype), False)
    attach(parameter, small)
    return parameter


def _keep(part: Any, weight: nn.Parameter, bias: Tensor | None, share: Share) -> None:
    """Copies: the file that the whole is mapped to can go, and what is tied to it stays whole."""
    part.weight = weight
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
