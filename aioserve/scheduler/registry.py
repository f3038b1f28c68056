"""Finds a policy class by installed name, by `package.module:Class`, or by `file.py:Class`.

Built-in policies and those of strangers come through the same door. Imports nothing but the one
policy that is asked for.
"""

import importlib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from aioserve.errors import ConfigError, UnknownPolicyError
from aioserve.scheduler.interface import SchedulerInterface

ENTRY_POINT_GROUP = "aioserve.policies"


def available_policies() -> dict[str, EntryPoint]:
    """Installed policies by name. Raises `ConfigError` if two packages claim one name."""
    found: dict[str, EntryPoint] = {}
    for entry_point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        other = found.setdefault(entry_point.name, entry_point)
        if other.value != entry_point.value:
            raise ConfigError(
                f"two installed packages offer a policy {entry_point.name!r}: "
                f"{other.value} and {entry_point.value}"
            )
    return found


def load_policy(spec: str) -> type[SchedulerInterface]:
    """The policy class that `spec` names. An error inside the policy's module is not masked.

    Raises `UnknownPolicyError` that lists what there is, or `ConfigError` if it is no scheduler.
    """
    path, colon, name = spec.rpartition(":")
    if not colon:
        policies = available_policies()
        if spec not in policies:
            raise UnknownPolicyError(
                f"unknown policy {spec!r}; available: {', '.join(policies) or 'none'}; "
                "or give package.module:Class or path/to/file.py:Class"
            )
        path, _, name = policies[spec].value.partition(":")
    module = _import_file(Path(path)) if path.endswith(".py") else _import_module(path)
    policy = getattr(module, name, None)
    if policy is None:
        raise UnknownPolicyError(f"unknown policy {spec!r}: no {name!r} in {path}")
    if not (isinstance(policy, type) and issubclass(policy, SchedulerInterface)):
        raise ConfigError(f"policy {spec!r} is not a SchedulerInterface; derive from BaseScheduler")
    if policy.__abstractmethods__:
        missing = ", ".join(sorted(policy.__abstractmethods__))
        raise ConfigError(f"policy {spec!r} does not implement {missing}")
    return policy


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports does not
        raise UnknownPolicyError(f"no module named {error.name!r} to take a policy from") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnknownPolicyError(f"no file {path} to take a policy from")
    name = f"aioserve_policy_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that dataclasses, pickles and tracebacks find it
    spec.loader.exec_module(module)
    return module
