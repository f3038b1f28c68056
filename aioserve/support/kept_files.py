"""Files that a start keeps for later starts in the user's cache.

A file there is whole and this user's own, or it is not there.

What is kept belongs to the files that it was made of and to the code that made it: `identities`
and `code_digest` say which these are, and a reader takes a file only if both are as before. Knows
nothing of what is in the files.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import msgspec

_PACKAGE = Path(__file__).parents[1]
_WRITING = ".writing-"  # how the names of files begin that are not whole
_GIVEN_UP = 3600.0  # seconds after which nothing writes such a file any more


def user_cache(name: str) -> Path:
    """Return the folder of this name for files of this user, which may not be there yet. Raises
    `RuntimeError` if the user has no home.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() / "aioserve" / name


def is_own(file: IO[bytes]) -> bool:
    """Return whether an open file belongs to this user: another's is not to be trusted."""
    return os.fstat(file.fileno()).st_uid == os.geteuid()


def note_read(path: Path) -> None:
    """Note that a file was read now, so that others make room first."""
    with suppress(OSError):  # a file system that is read alone
        os.utime(path)


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Have `write` fill a file, which has its name only when all of it is on the disk. Raises
    `OSError`, and what `write` raises.
    """
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=folder, prefix=_WRITING, delete=False) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # a name that is there stands for all of the file
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def make_room(folder: Path, suffix: str, most_bytes: int) -> None:
    """Let go what was read longest ago, while all files of this suffix together are larger than
    `most_bytes`, and what was never written to its end.
    """
    found = []
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # another process does the same
            stat = file.stat()
            if file.suffix == suffix:
                found.append((stat.st_mtime, stat.st_size, file))
            elif file.name.startswith(_WRITING) and stat.st_mtime < time.time() - _GIVEN_UP:
                file.unlink()
    found.sort()
    in_all = sum(size for _, size, _ in found)
    for _, size, file in found[:-1]:
        if in_all > most_bytes:
            in_all -= size
            file.unlink(missing_ok=True)


def identities(files: Iterable[Path]) -> list[Any]:
    """Return what identifies these files as they are. What is written to a file moves its
    `st_ctime`, which no program can set: so a file whose numbers are the same has the same content.
    """
    return [(str(file.resolve()), *identity(file)) for file in sorted(files)]


def identity(file: Path) -> tuple[int, ...]:
    """Return what identifies the content of one file, wherever it lies."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@cache
def code_digest(folders: tuple[str, ...]) -> str:
    """Return a digest of all Python code in these folders of the package."""
    code = hashlib.sha256()
    for folder in folders:
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            code.update(file.read_bytes())
    return code.hexdigest()


def digest(what: list[Any]) -> str:
    """Return a digest of plain data."""
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()
