"""What parts bring to the core, which imports none of them: each part says it in its own package.

A part is a package beside the core. Its `BRINGS` says, by the kind of what it brings and by name,
where that is: `package.module:Name`, or a module. Nothing is loaded before it is asked for. To add
a feature, write it into a folder of its part and give `BRINGS` a line.
"""

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: The packages that bring something, in the order in which it is found.
PARTS = ("aioserve.features", "aioserve.apis", "aioserve.fleet", "aioserve.gpu", "aioserve.lab")


@cache
def brought(kind: str) -> Mapping[Any, str]:
    """Return where what the parts bring of this kind is, by name."""
    return {name: path for own in _brought_by_each(kind) for name, path in own.items()}


def _brought_by_each(kind: str) -> Iterator[Mapping[Any, str]]:
    """Yield what each part brings of this kind; a part's package is imported when it is come to."""
    for package in PARTS:
        found: Mapping[Any, str] = importlib.import_module(package).BRINGS.get(kind, {})
        yield found


def load(kind: str, name: Any) -> Any:
    """Return what is brought by this name: a module, or what it calls so. Raises `KeyError` for a
    name that no part brings, and `ModuleNotFoundError` where a package is missing.
    """
    path = next((own[name] for own in _brought_by_each(kind) if name in own), None)
    if path is None:
        raise KeyError(name)
    module, _, attribute = path.partition(":")
    loaded = importlib.import_module(module)
    return attrgetter(attribute)(loaded) if attribute else loaded


class Brought(Generic[T]):
    """The things that parts bring of one kind, by name, for the place in the core that asks for it,
    which says by `T` what it asks of each.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __contains__(self, name: object) -> bool:
        return name in brought(self._kind)

    def __getitem__(self, name: Any) -> T:
        """Return what is brought by this name, loaded. Raises as `load` does."""
        found: T = load(self._kind, name)
        return found
