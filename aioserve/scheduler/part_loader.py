"""Finds a part of a policy by the name of a policy that has one, by file, or by entry point.

Reads what a configuration says of a part: its name and its options, with errors that name the part.
"""

from types import ModuleType
from typing import Any, TypeVar

from aioserve.errors import ConfigError, UnknownPolicyError
from aioserve.installed import installed_entry_points
from aioserve.named_module import import_named
from aioserve.nearest import did_you_mean
from aioserve.scheduler.options import PolicyOptions, make_options
from aioserve.scheduler.parts import Part
from aioserve.scheduler.registry import available_policies
from aioserve.zoo import is_zoo_name

GROUP = "aioserve.parts"  # of entry points, by which other packages register parts
#: Parts that stand in no policy's file.
STANDARD = {
    "arrival": "aioserve.policies.composed.parts:ArrivalOrder",
    "chunk": "aioserve.policies.composed.parts:ChunkBudget",
    "seats": "aioserve.policies.composed.parts:SeatsAdmission",
}

P = TypeVar("P", bound=Part)


def read_part(spec: Any, kind: type[P], where: str) -> tuple[type[P], PolicyOptions]:
    """The class and the options of a part, from its name or from a mapping of `part`, its name, and
    its options. `where` is the place in the configuration. Raises `ConfigError` that names both.
    """
    given = {"part": spec} if isinstance(spec, str) else dict(spec)
    name = given.pop("part", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where} must name a part, as in {{part: fair}}; got {spec!r:.100}")
    try:
        part = load_part(name, kind)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return part, make_options(given, part.Options, f"{where}, part {name!r}")


def load_part(spec: str, kind: type[P]) -> type[P]:
    """The part of this kind that `spec` names: `file.py`, `package.module`, either with `:Class`,
    an entry point of the group `aioserve.parts`, or a policy in whose file the part stands. Without
    a class: the only one. Raises `ConfigError` that lists what there is.
    """
    value = spec
    if ":" not in spec and ("." not in spec or is_zoo_name(spec)):
        value = _value(spec, kind)
    path, _, name = value.rpartition(":") if ":" in value else (value, "", "")
    module = import_named(path, "policy", UnknownPolicyError)
    found = getattr(module, name, None) if name else _only_part(module, kind, spec)
    if not (isinstance(found, type) and issubclass(found, kind)):
        known = [part.__name__ for part in _parts_in(module, kind)]
        raise ConfigError(
            f"{spec!r} is no part for {kind.kind}: expected a class that derives from "
            f"{kind.__name__}, got {found!r:.80}; {path} has {', '.join(known) or 'none'}"
        )
    return found


def _parts_in(module: ModuleType, kind: type[P]) -> list[type[P]]:
    """Those of this kind that the module defines itself."""
    return [
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, kind)
        if found.__module__ == module.__name__
    ]


def _only_part(module: ModuleType, kind: type[P], spec: str) -> type[P]:
    found = _parts_in(module, kind)
    if len(found) != 1:
        names = ", ".join(part.__name__ for part in found) or "none"
        raise ConfigError(
            f"{spec!r} must have one part for {kind.kind}, a class that derives from "
            f"{kind.__name__}; it has {names}" + ("; say which, by :Class" if found else "")
        )
    return found[0]


def _value(name: str, kind: type[Part]) -> str:
    """Where the part of that name stands: a module, maybe with `:Class`."""
    policies = {n: entry.value.partition(":")[0] for n, entry in available_policies().items()}
    named = policies | STANDARD | {e.name: e.value for e in installed_entry_points(GROUP)}
    if name not in named:
        known = sorted(n for n, value in named.items() if _offers(value, kind))
        raise ConfigError(
            f"unknown part {name!r}{did_you_mean(name, known)}; parts for {kind.kind}: "
            f"{', '.join(known) or 'none'}; or give package.module:Class or path/to/file.py"
        )
    return named[name]


def _offers(value: str, kind: type[Part]) -> bool:
    """Whether a part of this kind is there; what cannot be imported has none."""
    path, _, name = value.partition(":")
    try:
        module = import_named(path, "policy", UnknownPolicyError)
    except ConfigError:
        return False
    parts = _parts_in(module, kind)
    return name in {part.__name__ for part in parts} if name else bool(parts)
