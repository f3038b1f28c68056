"""The weights of a GGUF file: which tensor goes to which parameter, unpacked or as it is stored.

Names are those of the package gguf. A parameter may take several tensors, each in a part of it:
gate and up matrices of experts, say. Weights are unpacked one by one, straight into a model of
`transformers`.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aioserve.errors import ConfigError
from aioserve.features.gguf.config import Architecture
from aioserve.features.gguf.header import Tensor, read_bytes, unpack

if TYPE_CHECKING:
    import torch

    from aioserve.model_source.quantized_weight import QuantizedWeight


_LAYER = re.compile(r"\.(\d+)\.")


class Target(NamedTuple):
    """The parameter, or the part of one, that takes the weights of a tensor of the file."""

    parameter: str
    part: Callable[[Any], Any] | None = None  # a view of the parameter; None: all of it


class Filling:
    """The way of one tensor of a file: where it goes, and how it is stored there."""

    def __init__(
        self,
        architecture: Architecture,
        name: str,
        fields: Mapping[str, Any],
        read_elsewhere: Collection[str],
        metadata: Mapping[str, Any],
    ) -> None:
        """`name` is llama.cpp's of the architecture; `read_elsewhere` are tensors of which the
        configuration was made; `metadata` are all keys of the file.
        """
        self._metadata = metadata
        self._architecture, self._name, self._fields = architecture, name, fields
        self._read_elsewhere = read_elsewhere
        self._num_layers = int(fields.get("num_hidden_layers") or fields["n_layer"])

    def is_read_elsewhere(self, name: str) -> bool:
        """Return whether the tensor is none of the weights: read for the configuration, or of
        layers behind the last one, which predict further tokens.
        """
        layer = _LAYER.search(name)
        is_behind = layer is not None and int(layer[1]) >= self._num_layers
        return name in self._read_elsewhere or is_behind

    def targets(self, parameters: Collection[str], stored: Collection[str]) -> dict[str, Target]:
        """Return where each of the tensors that are `stored` goes, by name."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        name = self._architecture.named_as or self._name
        if name not in numbers:
            raise ConfigError(f"the package gguf does not know the architecture {name}")
        known = get_tensor_name_map(numbers[name], self._num_layers)
        found: dict[str, Target] = {}
        for parameter in parameters:
            for name, target in self._candidates(parameter, known):
                if name in stored:
                    found.setdefault(name, target)
        return found

    def _candidates(self, parameter: str, known: Any) -> Iterator[tuple[str, Target]]:
        """Yield names of tensors that may hold a parameter, or a part of it."""
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

    def number(self, parameter: str) -> float | None:
        """Return the number of a parameter that has one, and no tensor. Raises `ConfigError` if its
        key has none for this layer.
        """
        layer = _LAYER.search(parameter)
        for end, key in self._architecture.numbers.items():
            if layer is None or not parameter.endswith(end):
                continue
            stated = self._metadata.get(key)
            if not isinstance(stated, list) or len(stated) != self._num_layers:
                raise ConfigError(f"{key} has to be {self._num_layers} numbers, got {stated!r:.99}")
            return float(stated[int(layer[1])])
        return None

    def unstacked(self, tensors: Collection[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors, in the place of some the parts that lie one behind another in them."""
        for tensor in tensors:
            name = self._architecture.unstacked.get(tensor.name)
            if name is None:
                yield tensor
                continue
            count = tensor.shape[0]
            num_bytes = tensor.num_bytes // count
            for number in range(count):
                yield tensor._replace(
                    name=name.format(number),
                    shape=tensor.shape[1:],
                    offset=tensor.offset + number * num_bytes,
                    num_bytes=num_bytes,
                )

    def unpacked(self, tensor: Tensor) -> Any:
        """Return the weights as float32, a numpy array, as `transformers` stores them."""
        import numpy as np

        layout = self._architecture.layout
        return np.ascontiguousarray(layout(tensor.name, unpack(tensor), self._fields))

    def stored_kinds(self, outline: Any, tensors: Collection[Tensor]) -> dict[str, str]:
        """Return the formats of parameters that `fill` may leave as they are stored, by name."""
        parameters, tensors = dict(outline.named_parameters()), tuple(self.unstacked(tensors))
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
        """Return the format of `quantized` that a tensor is stored in, if it is one."""
        from gguf import GGMLQuantizationType

        from aioserve.features.quantized import FORMATS

        kind = GGMLQuantizationType(tensor.type_id).name
        return kind if kind in FORMATS else None

    def is_as_stored(self, tensor: Tensor) -> bool:
        """Return whether the weights of all experts lie in the file as `transformers` has them."""
        import numpy as np

        numbers = np.arange(tensor.shape[1])[None, :, None].repeat(tensor.shape[0], axis=0)
        found = self._architecture.layout(tensor.name, numbers, self._fields)
        return found.shape == numbers.shape and np.array_equal(found, numbers)

    def blocks(self, tensor: Tensor) -> "QuantizedWeight | None":
        """Return a matrix as it is stored, if its format is known and its layout differs by no more
        than the order of its rows; else None.
        """
        import torch

        from aioserve.features.quantized import quantized_weight

        kind, order = self.kind(tensor), self._order(tensor)
        if kind is None or order is None:
            return None
        rows = read_bytes(tensor).reshape(tensor.shape[0], -1)
        return quantized_weight(kind, torch.from_numpy(rows[order]))

    def _order(self, tensor: Tensor) -> Any:
        """Return which row of a matrix in the file each row of the parameter is; None if more
        differs.
        """
        import numpy as np

        if len(tensor.shape) != 2:
            return None
        numbers = np.arange(tensor.shape[0])[:, None]
        order = self._architecture.layout(tensor.name, numbers, self._fields)
        if order.shape != numbers.shape or not np.array_equal(np.sort(order, axis=0), numbers):
            return None
        return order[:, 0]


# Experts of a GGUF file that stay quantized: the tensors of one parameter, in blocks of a format.
# Gates and ups are two tensors of the file and one parameter of `transformers`; which rows are
# whose is found by what the architecture does to numbers.


_NAMES = ("gate_up_proj", "up_proj", "down_proj")


class Place(Protocol):
    """The place to which the weights of a tensor go."""

    @property
    def parameter(self) -> str:
        """The name of the model's parameter that takes the weights."""

    @property
    def part(self) -> Callable[[Any], Any] | None:
        """The part of the parameter that takes the weights; None: all of it."""


class Storage(Protocol):
    """The way in which tensors of an architecture are stored."""

    def kind(self, tensor: Tensor) -> str | None:
        """Return the format of `quantized` that a tensor is stored in, if it is one."""

    def is_as_stored(self, tensor: Tensor) -> bool:
        """Return whether the weights of all experts lie in the file as `transformers` has them."""


class PackedExperts:
    """One parameter of a module with the weights of all experts, [experts, out, in]; or the other
    way round, if that is transposed.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        kind: str,
        rows: Mapping[str, Any],
        matrices: dict[tuple[int, ...], Any],
    ) -> None:
        """`rows` are the outputs that each tensor has, by its name; `matrices` those that stand in
        for one expert, which layers share.
        """
        self._matrices = matrices
        self._owner, self._name, self._kind, self._rows = owner, name, kind, dict(rows)
        self._data: Any = None  # uint8 [experts, out, bytes of a row]

    def take(self, tensor: Tensor, data: Any) -> int:
        """Keep the bytes of a tensor, a numpy array; returns how many weights they are. After the
        last one the parameter stands in for them all.
        """
        import torch

        from aioserve.features.quantized import quantized_weight
        from aioserve.model_source.quantized_weight import StoredExperts

        parameter = getattr(self._owner, self._name)
        own = torch.from_numpy(data).view(*tensor.shape[:2], -1)
        if self._data is None:
            num_outputs = parameter.shape[2 if self._owner.is_transposed else 1]
            self._data = torch.empty(len(own), num_outputs, own.shape[2], dtype=torch.uint8)
        self._data[:, self._rows.pop(tensor.name)] = own
        if not self._rows:
            weights = [quantized_weight(self._kind, one) for one in self._data]
            stored = StoredExperts(weights, bool(self._owner.is_transposed))
            shape = weights[0].shape
            if shape not in self._matrices:
                self._matrices[shape] = stored.matrix(parameter.dtype)
            setattr(self._owner, self._name, stored.stand_in(self._matrices[shape]))
        return tensor.num_elements


def find_experts(
    module: Any,
    tensors: Collection[Tensor],
    targets: Mapping[str, Place],
    filling: Storage,
) -> dict[str, PackedExperts]:
    """Return what takes each tensor of experts that can stay as it is, by the tensor's name: where
    all of a parameter are in the same format, and differ from it by no more than the order of
    outputs.
    """
    by_parameter: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if (target := targets.get(tensor.name)) is not None:
            by_parameter.setdefault(target.parameter, []).append(tensor)
    found: dict[str, PackedExperts] = {}
    matrices: dict[tuple[int, ...], Any] = {}
    for path, owner, name in _weights(module):
        own = by_parameter.get(path, [])
        kinds = {filling.kind(tensor) for tensor in own}
        rows = {tensor.name: _rows(owner, name, tensor, targets, filling) for tensor in own}
        kind = kinds.pop() if len(kinds) == 1 else None
        whole = sum(tensor.num_elements for tensor in own) == getattr(owner, name).numel()
        if kind is not None and whole and None not in rows.values():
            experts = PackedExperts(owner, name, kind, rows, matrices)
            found |= dict.fromkeys(rows, experts)
    return found


def _weights(module: Any) -> Iterator[tuple[str, Any, str]]:
    """Weights of all experts as most of `transformers` has them: path, module, own name."""
    for path, owner in module.named_modules():
        for name in _NAMES if hasattr(owner, "is_transposed") else ():
            weight = getattr(owner, name, None)
            if weight is not None and weight.dim() == 3:
                yield f"{path}.{name}", owner, name


def _rows(
    owner: Any, name: str, tensor: Tensor, targets: Mapping[str, Place], filling: Storage
) -> Any:
    """Return the outputs of the parameter that are those of the tensor, in the tensor's order; None
    if it is stored in another way.
    """
    import torch

    weight = getattr(owner, name)
    num_outputs = weight.shape[2 if owner.is_transposed else 1]
    numbers = torch.arange(num_outputs).view(1, num_outputs, 1).expand(len(weight), -1, -1)
    part = targets[tensor.name].part
    place = numbers.transpose(1, 2) if owner.is_transposed else numbers
    found = place if part is None else part(place)
    if part is None and owner.is_transposed:
        return None
    if tuple(found.shape) != (*tensor.shape[:2], 1) or not filling.is_as_stored(tensor):
        return None
    return found[0, :, 0]


# The weights of a GGUF file, unpacked one by one straight into a model of `transformers`.


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

    from aioserve.model_source.quantized_weight import attach, stand_in

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
    """Return the weights in the shape of their place, which may differ by dimensions of 1 or by
    groups that are told apart (Mamba-2's norm).
    """
    same = [n for n in weights.shape if n != 1] == [n for n in place.shape if n != 1]
    is_flat = place.dim() == 1 and weights.numel() == place.numel()
    if not same and not is_flat:
        raise ConfigError(
            f"{what} has the shape {tuple(weights.shape)}, {name_of} needs {tuple(place.shape)}"
        )
    return weights.reshape(place.shape)
