"""Reads a YAML file: settings, a workload, step times. Errors are one line with file and place.

Knows nothing about what is in it.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioserve.errors import ConfigError, one_line
from aioserve.nearest import explain

T = TypeVar("T")


def read_yaml(path: Path, what: str) -> Any:
    """The file as plain data. Raises `ConfigError` that says `what` it is and where it is wrong."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506 - a safe one
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        why = ", ".join(filter(None, [error.problem, error.context]))
        raise ConfigError(f"{what} {where}: not valid YAML: {why}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:  # such as for a character
        why = str(getattr(error, "reason", error))
        raise ConfigError(f"{what} {path}: not valid YAML: {' '.join(why.split())}") from error
    except Exception as error:  # whatever an impossible date or too many brackets provoke
        raise ConfigError(f"{what} {path}: not valid YAML: {one_line(error)}") from error


def read_struct(path: Path, what: str, kind: type[T]) -> T:
    """The file as a struct. Raises `ConfigError` as above, or names the field."""
    tree = read_yaml(path, what)
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what} {path}: {explain(error, kind)}") from error
