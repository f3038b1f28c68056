"""Files to write for a command: whether they can be written is found out before the work.

Knows paths. Knows nothing about what is written.
"""

import os
from pathlib import Path

from aioserve.errors import ConfigError


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
