"""From a YAML file and dotted names to settings, with errors that name the place.

Files of Python that a YAML file names (policies, and parts of policies) are looked up beside that
file, then in the working directory; none of them is imported here. The key `like` of a file names
another engine, as the flag `--like` of the lab does: last, the settings that it stands for.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioserve.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


#: Settings that are mappings whose keys another's code knows.
OPTIONS = ("scheduler.options", "shadow.shadow_options", "runner.profile_options")


def read_sections(path: Path) -> dict[str, Any]:
    """Return the sections of a YAML file; raises `ConfigError` where it holds anything else."""
    from aioserve.support.files import read_yaml

    tree = read_yaml(path, "config file")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return tree


def read_file(
    path: str | Path, cls: type[msgspec.Struct], overridden: Collection[str] = ()
) -> dict[str, Any]:
    """Return what a settings file states, by section, with what its key `like` stands for. `path`
    may be the name of a file in `configs/`; `cls` has a field for each section; `overridden` are
    the settings that are stated elsewhere, as dotted names. Raises `ConfigError` that names the
    file and what is wrong in it.
    """
    from aioserve.support.files import find_config

    path = find_config(path)
    tree = read_sections(path)
    if "like" in tree:
        lay_preset(tree, str(path))
    convert(tree, cls, str(path))
    find_policies(tree, path, overridden)
    return tree


def set_value(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set the value at the path `dotted`, such as `a.b.c`, in nested dicts."""
    if isinstance(value, str) and dotted.startswith(OPTIONS):
        value = parse_option(value)  # the types are not known here
    *parents, leaf = dotted.split(".")
    for name in parents:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"cannot set {dotted}: {name} is not a section")
        tree = child
    tree[leaf] = value


def parse_option(text: str) -> Any:
    """Return `64`, `true`, `[1, 2]` or `{a: b}` as YAML reads it; any other text is itself."""
    from yaml import YAMLError

    from aioserve.support.files import parse_yaml

    try:
        return parse_yaml(text)
    except (YAMLError, ValueError):  # the latter for an impossible date
        return text


def convert(tree: dict[str, Any], cls: type[T], where: str | None, strict: bool = True) -> T:
    """Return the settings of a tree. `where` is the file with them; None: they are from other
    places. Raises `SettingError` for one value that cannot be, and `ConfigError` that names each of
    several in a file.
    """
    try:
        return msgspec.convert(tree, cls, strict=strict)
    except msgspec.ValidationError as error:
        from aioserve.support.mistakes import mistakes

        raise mistakes(error, tree, cls, where) from error


WORDS = {"scheduler": "policy", "shadow": "policy", "runner": "step-time source"}
_FILE = re.compile(r"(.+\.py)(:.*)?")


def find_policies(tree: dict[str, Any], path: Path, overridden: Collection[str]) -> None:
    """Have the policies and step times that are files of Python found from the working directory,
    and what their options name. Raises `ConfigError` for one whose file is in neither place.
    """
    for section, name, options in (
        ("scheduler", "policy", "options"),
        ("shadow", "shadow_policy", "shadow_options"),
        ("runner", "profile", "profile_options"),
    ):
        settings = tree.get(section, {})
        settings |= {options: _found(settings[options], path)} if options in settings else {}
        match = _FILE.fullmatch(settings.get(name) or "")
        if match is None or f"{section}.{name}" in overridden:
            continue
        settings[name] = _found(settings[name], path)
        if settings[name] == match[0] and not Path(match[1]).is_file():
            raise ConfigError(
                f"{path}: no file {Path(match[1])} to take a {WORDS[section]} from: looked in "
                f"{path.parent.absolute()} and in {Path.cwd()}"
            )


def _found(value: Any, path: Path) -> Any:
    """Return the value; where it names files of Python that lie beside `path`, with their paths."""
    if isinstance(value, dict):
        return {key: _found(each, path) for key, each in value.items()}
    if isinstance(value, list):
        return [_found(each, path) for each in value]
    match = _FILE.fullmatch(value) if isinstance(value, str) else None
    if match is None or not (beside := path.parent / match[1]).is_file():
        return value
    return f"{beside}{match[2] or ''}"


#: By the name of another engine, the settings under which a policy that decides as that engine's
#: scheduler does gives the same steps. vLLM 0.32 leaves no KV blocks free at admissions, preempts
#: the request that was admitted last, and admits none in a step that has preempted one;
#: tests/vllm/test_like.py compares the times with those of its class.
LIKE: dict[str, tuple[tuple[str, Any], ...]] = {
    "vllm": (
        ("cache.watermark", 0.0),
        ("scheduler.victim", "last_admitted"),
        ("scheduler.admit_beside_preemption", False),
    ),
}


def preset(engine: object, where: str) -> tuple[tuple[str, Any], ...]:
    """Return the settings by an engine's name. Raises `ConfigError` for one without an entry."""
    if not isinstance(engine, str) or engine not in LIKE:
        raise ConfigError(f"{where}: like must be one of {', '.join(LIKE)}, got {engine!r}")
    return LIKE[engine]


def lay_preset(tree: dict[str, Any], where: str) -> None:
    """Take the key `like` out of the settings of `where`, and set what it stands for where they
    state nothing else. Raises `ConfigError` for an engine that has no entry in `LIKE`.
    """
    for dotted, value in preset(tree.pop("like"), where):
        section, leaf = dotted.split(".")
        if isinstance(stated := tree.setdefault(section, {}), dict):
            stated.setdefault(leaf, value)
