"""Finds a router class by name, by `package.module:Class`, or by `file.py`.

Those that ship are the files of `aioserve.routers`; nothing else registers them. Imports nothing
but the one router that is asked for.
"""

import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aioserve.named_class import Kind, installed
from aioserve.routing.dispatcher import Dispatcher
from aioserve.routing.interface import BaseRouter

GROUP = "aioserve.routers"  # of entry points, by which other packages register routers
PACKAGE = "aioserve.routers"


def shipped(package: str, group: str) -> list[EntryPoint]:
    """An entry point for each module of a package, sorted by name."""
    spec = find_spec(package)
    paths = spec.submodule_search_locations if spec is not None else None
    names = sorted(found.name for found in pkgutil.iter_modules(paths or []))
    return [EntryPoint(name, f"{package}.{name}", group) for name in names]


def available_routers() -> dict[str, EntryPoint]:
    """Routers by name; `ConfigError` if two packages claim one name."""
    return installed(GROUP, "router", shipped(PACKAGE, GROUP))


_ROUTER = Kind(
    word="router",
    words="routers",
    interface=BaseRouter,  # type: ignore[type-abstract]
    base="BaseRouter",
    available=available_routers,
)


def load_router(spec: str) -> type[BaseRouter]:
    """The router class that `spec` names; a file is read anew each time. No class: the only one.

    Raises `ConfigError` that lists what there is, or says by file and line why it cannot be
    imported.
    """
    return _ROUTER.load(spec)


def make_dispatcher(
    spec: str,
    options: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    clock: Callable[[], float],
) -> Dispatcher:
    """A dispatcher that asks a router of the class that `spec` names. Raises `ConfigError`."""
    return Dispatcher(load_router(spec), options, seed=seed, clock=clock)


def short_name(spec: str) -> str:
    """The name of a router, or the class or file that `spec` names, as tables have it."""
    if ":" in spec:
        return spec.rpartition(":")[2]
    return Path(spec).stem if spec.endswith(".py") else spec
