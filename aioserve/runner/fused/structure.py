"""What a module must consist of to be recognized, and what its activation is by its numbers.

Knows modules of torch; knows no models.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.runner.fused.ops import Activation

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class NotFusedError(Exception):
    """The model stays with the modules of `transformers`; the message says why."""


def expect(module: nn.Module, names: set[str], all_or_none: Collection[str] = ()) -> None:
    """Exactly these children, and no weights of its own. Raises `NotFusedError`."""
    found = {name for name, _ in module.named_children()}
    found |= {name for name, _ in module.named_parameters(recurse=False)}
    if not found.isdisjoint(all_or_none):
        names = names | set(all_or_none)
    for name in sorted(names - found):
        raise NotFusedError(f"{type(module).__name__} has no {name}")
    for name in sorted(found - names):
        raise NotFusedError(f"{type(module).__name__} has {name}")


def child(module: nn.Module, name: str, kind: type[Any]) -> Any:
    """That of this name and kind. Raises `NotFusedError`."""
    found = getattr(module, name, None)
    if type(found) is not kind:  # a subclass may scale, quantize or adapt
        raise NotFusedError(f"{type(module).__name__}.{name} is no {kind.__name__}")
    return found


def find_activation(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """The activation that gives the same numbers as `function`; None if none is known."""
    x = torch.linspace(-6, 6, 193)
    found = function(x)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(found, known(x), rtol=1e-5, atol=1e-6):
            return name
    return None
