"""Helpers that no single room owns: names, files, logs, progress, the command line; the version."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__version__ = "0.3.0"


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names are imported when they are asked for.
    `homes` has the module of each name, as it is called within the package, or in full.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = home if home.startswith("aioserve.") else f"{package}.{home}"
        return getattr(import_module(module), name)

    return find
