"""What is wrong in a tree of settings: all of it, each in a sentence with its place.

Loaded when something is wrong.
"""

from typing import Any

import msgspec

from aioserve.errors import ConfigError, SettingError
from aioserve.support.nearest import explain, misfit, unknown_name

MOST = 20  # of one file, each in a line


def mistakes(
    error: msgspec.ValidationError, tree: dict[str, Any], cls: type, where: str | None
) -> ConfigError:
    """Return a `SettingError` for one value that cannot be, or a `ConfigError` that names each of
    several in the file `where`; None: what is wrong is not in a file, and the first is named.
    """
    first = _told(error, tree, cls, where)
    others = [] if where is None else _further(error, tree, cls, where)
    if not others:
        return first
    return ConfigError("\n  ".join([f"{1 + len(others)} errors:", str(first), *others]))


def _told(
    error: msgspec.ValidationError, tree: dict[str, Any], cls: type, where: str | None
) -> ConfigError:
    if (found := misfit(error, tree, cls)) is not None:
        return SettingError(where, *found)
    return ConfigError(f"{where or 'settings'}: {explain(error, cls)}")


def _further(
    error: msgspec.ValidationError, tree: dict[str, Any], cls: type, where: str
) -> list[str]:
    """Return what else of a tree cannot be, in words: it is read again without what was wrong."""
    errors: list[str] = []
    while len(errors) < MOST:
        found = misfit(error, tree, cls)
        wrong = unknown_name(error) if found is None else found[0]
        if wrong is None:
            break
        tree = _without(tree, wrong)
        try:
            msgspec.convert(tree, cls)
        except msgspec.ValidationError as another:
            error = another
            errors.append(str(_told(error, tree, cls, where)))
        else:
            break
    return errors


def _without(tree: dict[str, Any], dotted: str) -> dict[str, Any]:
    """Return a copy of the tree without the value at `a.b`; without `a`, if that is no mapping."""
    name, _, rest = dotted.partition(".")
    inner = tree.get(name)
    kept = {key: value for key, value in tree.items() if key != name}
    return kept | {name: _without(inner, rest)} if rest and isinstance(inner, dict) else kept
