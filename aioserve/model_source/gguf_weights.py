"""The weights of a GGUF file, unpacked one by one straight into a model of `transformers`."""

import logging
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioserve.errors import ConfigError
from aioserve.model_source.gguf_filling import Filling
from aioserve.model_source.gguf_header import Tensor
from aioserve.model_source.gguf_packed_experts import find_experts
from aioserve.model_source.gguf_tensors import read_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_WHOLE = ("F32", "F16", "BF16")  # types of numbers that are not quantized


def fill(
    module: Any, path: Path, tensors: Collection[Tensor], filling: Filling, keeps_blocks: bool
) -> None:
    """Give every parameter of `module` its weights; with `keeps_blocks`, what is quantized stays
    so beside it. Raises `ConfigError` for what is missing or left.
    """
    import torch
    from gguf import GGMLQuantizationType
    from torch import nn
    from transformers.utils.logging import tqdm

    from aioserve.model_source.quantized import attach, stand_in

    name_of, tensors = type(module).__name__, tuple(filling.unstacked(tensors))
    parameters = module.state_dict(keep_vars=True)
    targets = filling.targets(parameters, {tensor.name for tensor in tensors})
    missing, left, unpacked = set(parameters), [], Counter[str]()
    lacking = {name: parameter.numel() for name, parameter in parameters.items()}
    products = (nn.Linear, nn.Embedding)
    multiplied = {id(m.weight) for m in module.modules() if type(m) in products}
    experts = find_experts(module, tensors, targets, filling) if keeps_blocks else {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            if (number := filling.number(name)) is not None:
                parameter.fill_(number)
                missing.discard(name)
        for tensor in tqdm(tensors, desc="Unpacking weights"):
            target = targets.get(tensor.name)
            if target is None:
                left += [] if filling.is_read_elsewhere(tensor.name) else [tensor.name]
                continue
            parameter = parameters[target.parameter]
            if tensor.name in experts:
                taken = experts[tensor.name].take(tensor, read_bytes(tensor))
                lacking[target.parameter] -= taken
                missing -= {target.parameter} if lacking[target.parameter] <= 0 else set()
                continue
            stored = None
            if keeps_blocks and id(parameter) in multiplied and target.part is None:
                stored = filling.blocks(tensor)
            if stored is not None and stored.shape == parameter.shape:
                parameter.data = stand_in(stored.shape, parameter.dtype)
                attach(parameter, stored)
                lacking[target.parameter] = 0
            else:
                unpacked[GGMLQuantizationType(tensor.type_id).name] += tensor.num_bytes
                weights = torch.from_numpy(filling.unpacked(tensor))
                place = parameter if target.part is None else target.part(parameter)
                place.copy_(_shaped(weights, place, f"{path}: tensor {tensor.name}", name_of))
                lacking[target.parameter] -= place.numel()
            if lacking[target.parameter] <= 0:
                missing -= {name for name, other in parameters.items() if other is parameter}
    sizes = {kind: size for kind, size in unpacked.items() if kind not in _WHOLE}
    if sizes:
        logger.info(
            "%s: %.0f MB of %s are unpacked to %s",
            path.name,
            sum(sizes.values()) / 1e6,
            ", ".join(sorted(sizes)),
            str(module.dtype).removeprefix("torch."),
        )
    if missing:
        raise ConfigError(
            f"{len(missing)} weights of {name_of} are not in {path}, first {min(missing)}"
        )
    if left:
        raise ConfigError(
            f"{len(left)} tensors of {path} have no place in {name_of} of transformers, "
            f"first {left[0]}: without them its answers would be wrong"
        )


def _shaped(weights: "torch.Tensor", place: "torch.Tensor", what: str, name_of: str) -> Any:
    """The weights in the shape of their place, which may differ by dimensions of 1 or by groups
    that are told apart (Mamba-2's norm).
    """
    same = [n for n in weights.shape if n != 1] == [n for n in place.shape if n != 1]
    is_flat = place.dim() == 1 and weights.numel() == place.numel()
    if not same and not is_flat:
        raise ConfigError(
            f"{what} has the shape {tuple(weights.shape)}, {name_of} needs {tuple(place.shape)}"
        )
    return weights.reshape(place.shape)
