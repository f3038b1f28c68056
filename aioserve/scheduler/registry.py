"""Finds a policy class by installed name, by `package.module:Class`, or by `file.py`.

Built-in policies and those of strangers come through the same door. Imports nothing but the one
policy that is asked for.
"""

import importlib
import importlib.util
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from aioserve.errors import ConfigError, UnknownPolicyError
from aioserve.nearest import did_you_mean
from aioserve.scheduler.interface import POLICY_API, SchedulerInterface
from aioserve.zoo import GROUP, is_zoo_name, zoo_entry_points


def available_policies() -> dict[str, EntryPoint]:
    """Installed policies by name, also `zoo.srpt`; `ConfigError` if two packages claim one name."""
    found: dict[str, EntryPoint] = {}
    installed = [*entry_points(group=GROUP), *zoo_entry_points()]
    for entry_point in sorted(installed, key=lambda e: e.name):
        other = found.setdefault(entry_point.name, entry_point)
        if other.value != entry_point.value:
            raise ConfigError(
                f"two installed packages offer a policy {entry_point.name!r}: "
                f"{other.value} and {entry_point.value}"
            )
    return found


def load_policy(spec: str) -> type[SchedulerInterface]:
    """The policy class that `spec` names; a file is read anew each time. No class: the only one.

    Raises `UnknownPolicyError` that lists what there is, or `ConfigError` if it is no scheduler or
    cannot be imported: then with the file and line of the error, which is the cause.
    """
    path, name = _parse(spec)
    module = import_named(path)
    policy = getattr(module, name, None) if name else _only_policy(module, path)
    if policy is None:
        known = [kind.__name__ for kind in _policies_in(module)]
        raise UnknownPolicyError(
            f"unknown policy {spec!r}: no {name!r} in {path}{did_you_mean(name, known)}"
        )
    if not _is_policy(policy):
        raise ConfigError(f"policy {spec!r} is not a SchedulerInterface; derive from BaseScheduler")
    if policy.__abstractmethods__:
        missing = ", ".join(sorted(policy.__abstractmethods__))
        written = did_you_mean(missing, vars(policy)).replace("did you mean", "is it")
        raise ConfigError(f"policy {spec!r} does not implement {missing}{written}")
    _check_api(spec, getattr(policy, "policy_api", POLICY_API))
    return policy


def _check_api(spec: str, version: int) -> None:
    if version != POLICY_API:
        remedy = "upgrade aioserve" if version > POLICY_API else "CHANGELOG.md says what changed"
        raise ConfigError(
            f"policy {spec!r} is written for version {version} of the policy API, and this "
            f"aioserve has version {POLICY_API}: {remedy}"
        )


def _parse(spec: str) -> tuple[str, str]:
    """File or module, and class; "" if it names none."""
    path, colon, name = spec.rpartition(":")
    if colon:
        return path, name
    if "." in spec and not is_zoo_name(spec):
        return spec, ""
    policies = available_policies()
    if spec not in policies:
        raise UnknownPolicyError(
            f"unknown policy {spec!r}{did_you_mean(spec, policies)}; available: "
            f"{', '.join(policies) or 'none'}; or give package.module:Class or path/to/file.py"
        )
    path, _, name = policies[spec].value.partition(":")
    return path, name


def _is_policy(kind: Any) -> TypeGuard[type[SchedulerInterface]]:
    return isinstance(kind, type) and issubclass(kind, SchedulerInterface)


def _policies_in(module: ModuleType) -> list[type[SchedulerInterface]]:
    """Those that it defines itself, finished or not."""
    kinds = filter(_is_policy, vars(module).values())
    return [kind for kind in kinds if kind.__module__ == module.__name__]


def _only_policy(module: ModuleType, path: str) -> type[SchedulerInterface]:
    """The one that it defines. Raises `ConfigError` if there are more, or none."""
    found = _policies_in(module)
    complete = [kind for kind in found if not kind.__abstractmethods__] or found
    if not complete:
        raise ConfigError(f"{path} defines no policy: derive a class from BaseScheduler")
    if len(complete) > 1:
        raise ConfigError(
            f"{path} defines several policies: say which, one of "
            + ", ".join(f"{path}:{kind.__name__}" for kind in complete)
        )
    return complete[0]


def import_named(path: str) -> ModuleType:
    """A file, read anew each time, or a module. Raises `ConfigError` if it cannot be imported."""
    return _import_file(Path(path)) if path.endswith(".py") else _import_module(path)


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _not_importable(error, name) from error  # something that it imports is not there
        raise UnknownPolicyError(f"no module named {error.name!r} to take a policy from") from error
    except (Exception, SystemExit) as error:
        raise _not_importable(error, name) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UnknownPolicyError(f"no file {path}{where} to take a policy from")
    module = ModuleType(f"aioserve_policy_{path.stem}")
    module.__file__ = str(path.absolute())
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # so that dataclasses, pickles and tracebacks find it
    try:
        # Not by a loader: that would take the code of a file edited a moment ago from its cache.
        code = compile(path.read_bytes(), module.__file__, "exec")
        exec(code, module.__dict__)  # noqa: S102 - a policy is code, by an operator's word
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before
        raise _not_importable(error, str(path)) from error
    return module


def _not_importable(error: BaseException, policy: str) -> ConfigError:
    """In one line, with the place: of what is wrong in Python's eyes, or of what was running."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        where, message = f"{_shown(error.filename)}:{error.lineno}", error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if not f.filename.startswith("<") and f.filename != __file__]
        where = f"{_shown(own[-1].filename)}:{own[-1].lineno}" if own else policy
        message = " ".join(str(error).split())
    return ConfigError(f"{where}: cannot import the policy: {type(error).__name__}: {message}")


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
