"""Names under which modules could be imported before they moved: they work for one more release.

An import of an old name gives the module at its new place and a DeprecationWarning that says which.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc takes longer to import than this package

#: By the old name of a module, or of a package with all in it, the new one. A module that did not
#: move with its package stands before the package.
MOVED = {
    "aioserve.autoscalers": "aioserve.fleet.autoscalers",
    "aioserve.child": "aioserve.fleet.child",
    "aioserve.decision_log": "aioserve.lab.decision_log",
    "aioserve.formats": "aioserve.features.formats",
    "aioserve.grammars": "aioserve.features.grammars",
    "aioserve.hints": "aioserve.request",
    "aioserve.kv_connector": "aioserve.features.kv_connector",
    "aioserve.language_model": "aioserve.engine.language_model",
    "aioserve.multimodal": "aioserve.features.multimodal",
    "aioserve.operations": "aioserve.engine.operations",
    "aioserve.pooling_params": "aioserve.params",
    "aioserve.ray": "aioserve.fleet.ray",
    "aioserve.routers": "aioserve.fleet.routers",
    "aioserve.routing": "aioserve.fleet.routing",
    "aioserve.sampling_params": "aioserve.params",
    "aioserve.structured_outputs": "aioserve.params",
    "aioserve.testing.autoscalers.contract": "aioserve.testing.autoscaler_contract",
    "aioserve.testing.autoscalers": "aioserve.testing.autoscaler_contract",
    "aioserve.testing.formats.contract": "aioserve.testing.format_contract",
    "aioserve.testing.formats": "aioserve.testing.format_contract",
    "aioserve.testing.routers.contract": "aioserve.testing.router_contract",
    "aioserve.testing.routers": "aioserve.testing.router_contract",
    "aioserve.workers": "aioserve.fleet.workers",
}


def new_name(name: str) -> str | None:
    """Return where the module is now whose name was `name`; None if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


class MovedModules:
    """A finder of modules that is asked first: of an old folder, caches may lie on the disk still,
    which Python would take for a package without anything in it.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what loads `name` from its new place; None if it is no old name."""
        new = new_name(name) if name.startswith("aioserve.") else None
        if new is None:
            return None
        try:
            module = importlib.import_module(new)
        except ModuleNotFoundError as error:
            if error.name != new:
                raise
            return None
        warnings.warn(
            f"{name} is now {new}: the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        # A package that is a module now is taken for one still, where old modules were in it.
        is_package = hasattr(module, "__path__") or any(o.startswith(f"{name}.") for o in MOVED)
        return ModuleSpec(name, _Moved(module), is_package=is_package)


class _Moved(Loader):
    """A loader that gives the module itself, not a second one of the same file."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has set that of the old name


def find_old_names() -> None:
    """Let imports of old names succeed from here on. Idempotent."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
