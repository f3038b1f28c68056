"""From a YAML file and dotted names to settings, with errors that name the place."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioserve.errors import ConfigError, SettingError
from aioserve.nearest import explain, misfit
from aioserve.yaml_file import read_yaml

T = TypeVar("T", bound=msgspec.Struct)


def read_sections(path: Path) -> dict[str, Any]:
    """The sections of a YAML file; raises `ConfigError` where it holds anything else."""
    tree = read_yaml(path, "config file")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return tree


def set_value(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `a.b.c` in nested dicts."""
    if isinstance(value, str) and dotted.startswith(("scheduler.options", "shadow.shadow_options")):
        value = _parse_option(value)  # the policy's types are not known here
    *parents, leaf = dotted.split(".")
    for name in parents:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"cannot set {dotted}: {name} is not a section")
        tree = child
    tree[leaf] = value


def _parse_option(text: str) -> Any:
    """Read `64`, `true`, `[1, 2]` or `{a: b}` as YAML would; anything else is itself."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def convert(tree: dict[str, Any], cls: type[T], where: str | None, strict: bool = True) -> T:
    """`where` is the file with the settings; None: they are from other places."""
    try:
        return msgspec.convert(tree, cls, strict=strict)
    except msgspec.ValidationError as error:
        if (found := misfit(error, tree, cls)) is not None:
            raise SettingError(where, *found) from error
        raise ConfigError(f"{where or 'settings'}: {explain(error, cls)}") from error
