"""Files to write: whether they can be written is found out before the work; logs lose no older one.

Knows paths. Knows nothing about what is written.
"""

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from aioserve.errors import ConfigError

logger = logging.getLogger(__name__)


def why_not_writable(name: str) -> str:
    """Why no file of that name can be written; "" if one can."""
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
