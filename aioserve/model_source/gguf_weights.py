"""The weights of a GGUF file, unpacked one by one straight into a model of `transformers`.

Names are those of the package gguf. A parameter may take several tensors, each in a part of it:
gate and up matrices of experts, say.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aioserve.errors import ConfigError, one_line
from aioserve.model_source.gguf_config import Architecture
from aioserve.model_source.gguf_header import Tensor
from aioserve.model_source.gguf_packed_experts import find_experts

if TYPE_CHECKING:
    import torch

    from aioserve.model_source.quantized import QuantizedWeight

logger = logging.getLogger(__name__)

_PIECE = 1 << 20  # weights that are unpacked at a time
_WHOLE = ("F32", "F16", "BF16")  # types of numbers that are not quantized
_LAYER = re.compile(r"\.(\d+)\.")


class Target(NamedTuple):
    """The parameter, or the part of one, that takes the weights of a tensor of the file."""

    parameter: str
    part: Callable[[Any], Any] | None = None  # a view of the parameter; None: all of it


def fill(
    module: Any, path: Path, tensors: Collection[Tensor], filling: "Filling", keeps_blocks: bool
) -> None:
    """Give every parameter of `module` its weights; with `keeps_blocks`, what is quantized stays
    so beside it. Raises `ConfigError` for what is missing or left.
    """
    import torch
    from gguf import GGMLQuantizationType
    from torch import nn
    from transformers.utils.logging import tqdm

    from aioserve.model_source.quantized import attach, stand_in

    name_of = type(module).__name__
    parameters = module.state_dict(keep_vars=True)
    targets = filling.targets(parameters, {tensor.name for tensor in tensors})
    missing, left, unpacked = set(parameters), [], Counter[str]()
    lacking = {name: parameter.numel() for name, parameter in parameters.items()}
    products = (nn.Linear, nn.Embedding)
    multiplied = {id(m.weight) for m in module.modules() if type(m) in products}
    experts = find_experts(module, tensors, targets, filling) if keeps_blocks else {}
    with torch.no_grad():
        for tensor in tqdm(tensors, desc="Unpacking weights"):
            target = targets.get(tensor.name)
            if target is None:
                left += [] if filling.is_read_elsewhere(tensor.name) else [tensor.name]
                continue
            parameter = parameters[target.parameter]
            if tensor.name in experts:
                taken = experts[tensor.name].take(tensor, _read(tensor))
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


class Filling:
    """Which tensor of a file goes where, and how it is stored there."""

    def __init__(
        self,
        architecture: Architecture,
        name: str,
        fields: Mapping[str, Any],
        read_elsewhere: Collection[str],
    ) -> None:
        """`name` is llama.cpp's of the architecture; `read_elsewhere` are tensors of which the
        configuration was made.
        """
        self._architecture, self._name, self._fields = architecture, name, fields
        self._read_elsewhere = read_elsewhere
        self._num_layers = int(fields.get("num_hidden_layers") or fields["n_layer"])

    def is_read_elsewhere(self, name: str) -> bool:
        """Whether the tensor is none of the weights: read for the configuration, or of layers
        behind the last one, which predict further tokens.
        """
        layer = _LAYER.search(name)
        is_behind = layer is not None and int(layer[1]) >= self._num_layers
        return name in self._read_elsewhere or is_behind

    def targets(self, parameters: Collection[str], stored: Collection[str]) -> dict[str, Target]:
        """Where each of the tensors that are `stored` goes, by name."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        if self._name not in numbers:
            raise ConfigError(f"the package gguf does not know the architecture {self._name}")
        known = get_tensor_name_map(numbers[self._name], self._num_layers)
        found: dict[str, Target] = {}
        for parameter in parameters:
            for name, target in self._candidates(parameter, known):
                if name in stored:
                    found.setdefault(name, target)
        return found

    def _candidates(self, parameter: str, known: Any) -> Iterator[tuple[str, Target]]:
        """Names of tensors that may hold a parameter, or a part of it."""
        layer = _LAYER.search(parameter)
        block = f"blk.{layer[1]}." if layer else ""
        for end, name in self._architecture.names.items():
            if parameter.endswith(end):
                yield block + name, Target(parameter)
        yield from (
            (block + name, Target(parameter, part))
            for name, part in self._architecture.parts(parameter, self._fields)
        )
        # some were converted from the part of the model that has no head
        inner = parameter.partition(".")[2]
        for name in (parameter, inner, f"{self._architecture.stem}.{inner}"):
            ours = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if ours is not None:
                yield from ((ours + end, Target(parameter)) for end in ("", ".weight"))

    def unpacked(self, tensor: Tensor) -> Any:
        """The weights as float32, a numpy array, as `transformers` stores them."""
        import numpy as np

        layout = self._architecture.layout
        return np.ascontiguousarray(layout(tensor.name, unpack(tensor), self._fields))

    def stored_kinds(self, outline: Any, tensors: Collection[Tensor]) -> dict[str, str]:
        """The formats of parameters that `fill` may leave as they are stored, by name."""
        parameters = dict(outline.named_parameters())
        targets = self.targets(parameters, {tensor.name for tensor in tensors})
        experts = find_experts(outline, tensors, targets, self)
        found = {}
        for tensor in tensors:
            target, kind = targets.get(tensor.name), self.kind(tensor)
            if target is None or kind is None:
                continue
            is_matrix = target.part is None and self._order(tensor) is not None
            if is_matrix or tensor.name in experts:
                found[target.parameter] = kind
        return found

    def kind(self, tensor: Tensor) -> str | None:
        """The format of `quantized` that a tensor is stored in, if it is one."""
        from gguf import GGMLQuantizationType

        from aioserve.model_source.quantized import FORMATS

        kind = GGMLQuantizationType(tensor.type_id).name
        return kind if kind in FORMATS else None

    def is_as_stored(self, tensor: Tensor) -> bool:
        """Whether the weights of all experts lie in the file as `transformers` has them."""
        import numpy as np

        numbers = np.arange(tensor.shape[1])[None, :, None].repeat(tensor.shape[0], axis=0)
        found = self._architecture.layout(tensor.name, numbers, self._fields)
        return found.shape == numbers.shape and np.array_equal(found, numbers)

    def blocks(self, tensor: Tensor) -> "QuantizedWeight | None":
        """A matrix as it is stored, if its format is known and its layout differs by no more than
        the order of its rows; else None.
        """
        import torch

        from aioserve.model_source.quantized import QuantizedWeight

        kind, order = self.kind(tensor), self._order(tensor)
        if kind is None or order is None:
            return None
        rows = _read(tensor).reshape(tensor.shape[0], -1)
        return QuantizedWeight(kind, torch.from_numpy(rows[order]))

    def _order(self, tensor: Tensor) -> Any:
        """Which row of a matrix in the file each row of the parameter is; None if more differs."""
        import numpy as np

        if len(tensor.shape) != 2:
            return None
        numbers = np.arange(tensor.shape[0])[:, None]
        order = self._architecture.layout(tensor.name, numbers, self._fields)
        if order.shape != numbers.shape or not np.array_equal(np.sort(order, axis=0), numbers):
            return None
        return order[:, 0]


def _read(tensor: Tensor) -> Any:
    """Its bytes, a numpy array."""
    import numpy as np

    return np.fromfile(tensor.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)


def unpack(tensor: Tensor) -> Any:
    """The weights of a tensor as float32, a numpy array of its shape. Raises `ConfigError` for a
    type that cannot be unpacked.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.type_id)
    rows = _read(tensor).reshape(-1, tensor.num_bytes * tensor.shape[-1] // tensor.num_elements)
    weights = np.empty((len(rows), tensor.shape[-1]), dtype=np.float32)
    step = max(1, _PIECE // tensor.shape[-1])  # `dequantize` takes several times what it returns
    try:
        for start in range(0, len(rows), step):
            piece = slice(start, start + step)
            weights[piece] = dequantize(rows[piece], kind)
    except NotImplementedError as error:
        raise ConfigError(
            f"{tensor.path}: tensor {tensor.name} is {kind.name}, which cannot be unpacked: "
            f"{one_line(error)}"
        ) from None
    return weights.reshape(tensor.shape)
