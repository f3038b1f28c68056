"""Finds what registers itself by name: entry points of other packages, files of packages here.

Knows where names are listed. Imports none of what they name.
"""

import pkgutil
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path

from aioserve.errors import ConfigError

Folders = tuple[tuple[Path, int], ...]  # each with the time of its last change, in nanoseconds


def installed_entry_points(group: str) -> EntryPoints:
    """The entry points of a group that installed packages have; packages are read anew where a
    folder of `sys.path` has changed, as every installation changes one.
    """
    return _read(group, _changed(sys.path))


def _changed(paths: Iterable[str]) -> Folders:
    """The folders that there are, each with the time of its last change."""
    folders = [Path(path or ".") for path in paths]
    return tuple((folder, folder.stat().st_mtime_ns) for folder in folders if folder.exists())


@lru_cache
def _read(group: str, folders: Folders) -> EntryPoints:
    """The entry points of a group, as these folders with their times of change hold them."""
    return entry_points(group=group)


def shipped(package: str, group: str, prefix: str = "") -> list[EntryPoint]:
    """An entry point for each module of a package, sorted by name. Its value names the module, its
    name begins with `prefix`.
    """
    spec = find_spec(package)
    paths = spec.submodule_search_locations if spec is not None else None
    names = _modules(_changed(paths or ()))
    return [EntryPoint(prefix + name, f"{package}.{name}", group) for name in names]


@lru_cache
def _modules(folders: Folders) -> list[str]:
    """The names of the modules that these folders with their times of change hold, sorted."""
    return sorted(found.name for found in pkgutil.iter_modules([str(f) for f, _ in folders]))


def installed(group: str, word: str, more: Iterable[EntryPoint] = ()) -> dict[str, EntryPoint]:
    """Entry points of a group, and `more`, by name; `ConfigError` if two packages claim one name.
    `word` says in that message what they are, as `policy`.
    """
    found: dict[str, EntryPoint] = {}
    for entry_point in sorted([*installed_entry_points(group), *more], key=lambda e: e.name):
        other = found.setdefault(entry_point.name, entry_point)
        if other.value != entry_point.value:
            raise ConfigError(
                f"two installed packages offer a {word} {entry_point.name!r}: "
                f"{other.value} and {entry_point.value}"
            )
    return found
