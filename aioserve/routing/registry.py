"""Finds a router or autoscaler class by name, by `package.module:Class`, or by `file.py`.

Those that ship are the files of `aioserve.routers` and `aioserve.autoscalers`; nothing else
registers them. Imports nothing but the one class that is asked for.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from aioserve.installed import installed, shipped
from aioserve.named_class import Kind
from aioserve.routing.autoscaler import AutoscalerInterface
from aioserve.routing.dispatcher import Dispatcher
from aioserve.routing.interface import BaseRouter

GROUP = "aioserve.routers"  # of entry points, by which other packages register routers
PACKAGE = "aioserve.routers"
AUTOSCALER_GROUP = AUTOSCALER_PACKAGE = "aioserve.autoscalers"


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


def available_autoscalers() -> dict[str, EntryPoint]:
    """Autoscalers by name; `ConfigError` if two packages claim one name."""
    found = shipped(AUTOSCALER_PACKAGE, AUTOSCALER_GROUP)
    return installed(AUTOSCALER_GROUP, "autoscaler", found)


_AUTOSCALER = Kind(
    word="autoscaler",
    words="autoscalers",
    interface=AutoscalerInterface,  # type: ignore[type-abstract]
    base="AutoscalerInterface",
    available=available_autoscalers,
)


def load_autoscaler(spec: str) -> type[AutoscalerInterface]:
    """The autoscaler class that `spec` names, as `load_router` finds a router."""
    return _AUTOSCALER.load(spec)


def short_name(spec: str) -> str:
    """The name of a router or autoscaler, or the class or file that `spec` names, for tables."""
    if ":" in spec:
        return spec.rpartition(":")[2]
    return Path(spec).stem if spec.endswith(".py") else spec
