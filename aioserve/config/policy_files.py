"""Files of Python that a YAML file of settings names: policies, and parts of policies.

They are looked up beside that file, then in the working directory. Imports none of them.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from aioserve.errors import ConfigError

_FILE = re.compile(r"(.+\.py)(:.*)?")


def find_policies(tree: dict[str, Any], path: Path, overridden: Collection[str]) -> None:
    """Have the policies that are files of Python found from the working directory, and what their
    options name. Raises `ConfigError` for a policy whose file is in neither place.
    """
    for section, name, options in (
        ("scheduler", "policy", "options"),
        ("shadow", "shadow_policy", "shadow_options"),
    ):
        settings = tree.get(section, {})
        settings |= {options: _found(settings[options], path)} if options in settings else {}
        match = _FILE.fullmatch(settings.get(name) or "")
        if match is None or f"{section}.{name}" in overridden:
            continue
        settings[name] = _found(settings[name], path)
        if settings[name] == match[0] and not Path(match[1]).is_file():
            raise ConfigError(
                f"{path}: no file {Path(match[1])} to take a policy from: looked in "
                f"{path.parent.absolute()} and in {Path.cwd()}"
            )


def _found(value: Any, path: Path) -> Any:
    """The value; where it names files of Python that lie beside `path`, with their paths."""
    if isinstance(value, dict):
        return {key: _found(each, path) for key, each in value.items()}
    if isinstance(value, list):
        return [_found(each, path) for each in value]
    match = _FILE.fullmatch(value) if isinstance(value, str) else None
    if match is None or not (beside := path.parent / match[1]).is_file():
        return value
    return f"{beside}{match[2] or ''}"
