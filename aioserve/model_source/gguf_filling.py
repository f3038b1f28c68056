"""Which tensor of a GGUF file goes to which parameter of a model, and how it is stored there.

Names are those of the package gguf. A parameter may take several tensors, each in a part of it:
gate and up matrices of experts, say.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aioserve.errors import ConfigError
from aioserve.model_source.gguf_config import Architecture
from aioserve.model_source.gguf_header import Tensor
from aioserve.model_source.gguf_packed_experts import find_experts
from aioserve.model_source.gguf_tensors import read_bytes, unpack

if TYPE_CHECKING:
    from aioserve.model_source.quantized import QuantizedWeight

_LAYER = re.compile(r"\.(\d+)\.")


class Target(NamedTuple):
    """The parameter, or the part of one, that takes the weights of a tensor of the file."""

    parameter: str
    part: Callable[[Any], Any] | None = None  # a view of the parameter; None: all of it


class Filling:
    """Which tensor of a file goes where, and how it is stored there."""

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

    def number(self, parameter: str) -> float | None:
        """The number of a parameter that has one, and no tensor. Raises `ConfigError` if its key
        has none for this layer.
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
        """The tensors, in the place of some the parts that lie one behind another in them."""
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
        """The weights as float32, a numpy array, as `transformers` stores them."""
        import numpy as np

        layout = self._architecture.layout
        return np.ascontiguousarray(layout(tensor.name, unpack(tensor), self._fields))

    def stored_kinds(self, outline: Any, tensors: Collection[Tensor]) -> dict[str, str]:
        """The formats of parameters that `fill` may leave as they are stored, by name."""
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
        rows = read_bytes(tensor).reshape(tensor.shape[0], -1)
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
