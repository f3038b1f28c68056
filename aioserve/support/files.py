"""Files by which commands are told what to do, and files that they write.

YAML files, with errors in one line that names file and place; the files of `configs/`, which come
with the package; and files to write, of which it is found out before the work whether they can be
written, and whose logs lose no older one.
"""

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioserve.errors import ConfigError, did_you_mean, one_line
from aioserve.support.plugins import PREFIX, is_zoo_name

T = TypeVar("T")


def read_yaml(path: Path, what: str) -> Any:
    """Return the file as plain data. Raises `ConfigError` that says `what` it is and where it is
    wrong.
    """
    import yaml

    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
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


def parse_yaml(text: str) -> Any:
    """Return YAML as plain data, `1e-3` as a number, as in YAML 1.2. Raises `YAMLError`, and
    `ValueError` for an impossible date.
    """
    import yaml

    return yaml.load(text, _yaml_loader())  # noqa: S506 - a safe one


@cache
def _yaml_loader() -> Any:
    import yaml

    loader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    number = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return loader


def read_struct(path: Path, what: str, kind: type[T]) -> T:
    """Return the file as a struct. Raises `ConfigError` as above, or names the field."""
    tree = read_yaml(path, what)
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        from aioserve.support.mistakes import explain

        raise ConfigError(f"{what} {path}: {explain(error, kind)}") from error


# The files of `configs/` by name: inside an installed package, or at the top of a clone.


HERE = Path(__file__).parents[1]


def find_config(name_or_path: str | Path) -> Path:
    """Return a YAML file of settings. Raises `ConfigError` that lists the names that there are."""
    return _find(name_or_path, "config", "")


def find_workload(name_or_path: str | Path) -> Path:
    """Return a description of a workload, or a trace. Raises `ConfigError` as above."""
    return _find(name_or_path, "workload", "workloads")


def find_fleet(name_or_path: str | Path) -> Path:
    """Return a description of a fleet. Raises `ConfigError` as above."""
    return _find(name_or_path, "fleet", "fleets")


def _find(name_or_path: str | Path, kind: str, folder: str) -> Path:
    """A bare word is a name, and so is `zoo.srpt`; whatever has a suffix or a folder is a path."""
    name = str(name_or_path)
    if {*"./"} & {*name} and not is_zoo_name(name):
        return Path(name)
    shipped = _shipped(folder)
    if name not in shipped:
        raise ConfigError(
            f"unknown {kind} {name!r}{did_you_mean(name, shipped)}; available: "
            f"{', '.join(sorted(shipped)) or 'none'}; or give a path to a .yaml file"
        )
    return shipped[name]


def config_names() -> set[str]:
    """Return the names of the files of settings that ship."""
    return set(_shipped(""))


def workload_names() -> set[str]:
    """Return the names of the workloads that ship."""
    return set(_shipped("workloads"))


def fleet_names() -> set[str]:
    """Return the names of the fleet files that ship."""
    return set(_shipped("fleets"))


def _shipped(folder: str) -> dict[str, Path]:
    found = {file.stem: file for file in (configs_folder() / folder).glob("*.yaml")}
    zoo = () if folder else (configs_folder() / "zoo").glob("*.yaml")
    return found | {PREFIX + file.stem: file for file in zoo}


def configs_folder() -> Path:
    """Return the folder of the files of settings that come with the package."""
    installed = HERE / "configs"
    return installed if installed.is_dir() else HERE.parent / "configs"


# Files to write: whether they can be written is found out before the work; logs lose no older one.


logger = logging.getLogger(__name__)


def why_not_writable(name: str) -> str:
    """Return why no file of that name can be written; "" if one can."""
    path = Path(name)
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied"
    return ""


def check_writable(name: str | None, what: str) -> None:
    """Raises `ConfigError` if a file is wanted that cannot be written."""
    if name is not None and (why := why_not_writable(name)):
        raise ConfigError(f"cannot write {what} {name}: {why}")


def write(name: str | None, data: bytes) -> None:
    """Write the file, if one is wanted. Raises `ConfigError`."""
    if name is None:
        return
    try:
        Path(name).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror}") from error


def begin_log(name: str, what: str, mode: int) -> Callable[[], int]:
    """Begin a log in an empty file of that name, with at most these permissions. Returns what opens
    it, once, on a thread that may wait: a FIFO is open when something reads it.

    An older log of that name is never lost: it is renamed to the next of NAME.1.EXT, NAME.2.EXT ...
    Devices and FIFOs stay what they are. Raises `ConfigError`.
    """
    path = Path(os.path.realpath(name))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    try:
        found = path.stat() if path.exists() else None
        is_file = found is None or stat.S_ISREG(found.st_mode)
        if name.startswith(("/dev/", "/proc/")):  # what a standard stream leads to is not ours
            is_file = False
        if is_file and found is not None and found.st_size:
            logger.info("the older %s is kept as %s", what, _put_aside(path))
        if found is not None and stat.S_ISFIFO(found.st_mode):
            return _open_fifo(path, flags, what)
        file = os.open(path, flags | (os.O_CREAT if is_file else 0), mode)
        if is_file:  # it may have been there, empty
            with contextlib.suppress(PermissionError):
                os.fchmod(file, os.fstat(file).st_mode & mode)
    except OSError as error:
        raise ConfigError(f"cannot write {what} {name}: {error.strerror}") from error
    return lambda: file


def _open_fifo(path: Path, flags: int, what: str) -> Callable[[], int]:
    try:
        file = os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        logger.warning("%s is a FIFO that nothing reads yet: the %s waits", path, what)
        return lambda: os.open(path, flags)
    os.set_blocking(file, True)
    return lambda: file


def _put_aside(path: Path) -> Path:
    """Rename a file to a name that no file has; returns it. Raises `ConfigError`."""
    numbered = re.compile(rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}")
    try:
        taken = [numbered.fullmatch(other.name) for other in path.parent.iterdir()]
        number = max((int(found[1]) for found in taken if found), default=0)
        while True:
            number += 1
            free = path.with_name(f"{path.stem}.{number}{path.suffix}")
            try:
                os.link(path, free)
                path.unlink()
            except FileExistsError:  # of a server that starts at the same time
                continue
            except OSError:  # a file system without links
                if free.exists():
                    raise
                path.rename(free)
            return free
    except OSError as error:
        raise ConfigError(
            f"{path} holds the log of an earlier run, which cannot be kept beside it: "
            f"{error.strerror}; move it away"
        ) from error
