"""Experts of a GGUF file that stay quantized: the tensors of one parameter, in blocks of a format.

Gates and ups are two tensors of the file and one parameter of `transformers`; which rows are whose
is found by what the architecture does to numbers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

from aioserve.model_source.gguf_header import Tensor

_NAMES = ("gate_up_proj", "up_proj", "down_proj")


class Place(Protocol):
    """Where the weights of a tensor go."""

    @property
    def parameter(self) -> str:
        """The name of the parameter."""

    @property
    def part(self) -> Callable[[Any], Any] | None:
        """The part of the parameter that takes them; None: all of it."""


class Storage(Protocol):
    """How tensors of an architecture are stored."""

    def kind(self, tensor: Tensor) -> str | None:
        """The format of `quantized` that a tensor is stored in, if it is one."""

    def is_as_stored(self, tensor: Tensor) -> bool:
        """Whether the weights of all experts lie in the file as `transformers` has them."""


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

        from aioserve.model_source.quantized import QuantizedWeight, StoredExperts

        parameter = getattr(self._owner, self._name)
        own = torch.from_numpy(data).view(*tensor.shape[:2], -1)
        if self._data is None:
            num_outputs = parameter.shape[2 if self._owner.is_transposed else 1]
            self._data = torch.empty(len(own), num_outputs, own.shape[2], dtype=torch.uint8)
        self._data[:, self._rows.pop(tensor.name)] = own
        if not self._rows:
            weights = [QuantizedWeight(self._kind, one) for one in self._data]
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
    """What takes each tensor of experts that can stay as it is, by the tensor's name: where all of
    a parameter are in the same format, and differ from it by no more than the order of outputs.
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
    """The outputs of the parameter that are those of the tensor, in the tensor's order; None if it
    is stored in another way.
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
