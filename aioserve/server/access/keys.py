"""Keys that clients show, and what a request claims of the limits of its key.

Keys are read from a file and the environment and recognized in constant time. Only digests are
kept: no key stays in memory, nor goes to a worker or into a log. What each key has used is counted
in `accounts`. Knows no HTTP.
"""

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError

logger = logging.getLogger(__name__)

#: The environment's keys, with commas between them.
ENVIRONMENT = "AIOSERVE_API_KEYS"

SHORT_KEY = 16  # characters: the hash of a shorter key can be reversed by trying all

Name = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,64}$")]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
PositiveInt = Annotated[int, Meta(ge=1)]
Priority = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Rights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rights of a key; None: as much as there is."""

    admin: bool = False  # whether it may use the admin routes as well
    max_requests: PositiveInt | None = None  # at once
    tokens_per_minute: PositiveInt | None = None  # of prompts and outputs together
    most_urgent_priority: Priority | None = None  # the smallest that its requests may have
    hints: tuple[Name, ...] | None = None  # names of those that its requests may have
    cache_salt: Name | None = None  # keys that have it share cached prefixes; None: its name

    @property
    def is_counted(self) -> bool:
        """Whether the key has limits to check before a request of it runs."""
        return self.max_requests is not None or self.tokens_per_minute is not None


class Key(Rights, frozen=True, kw_only=True):
    """One key, as it is known here."""

    name: Name  # in logs and metrics
    sha256: Digest


class _Entry(Rights, frozen=True, kw_only=True):
    """A key as a YAML file of keys writes it."""

    name: Name | None = None  # default: made of its hash
    key: str | None = None
    sha256: Digest | None = None  # in its place, where the file should not hold it


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Entry]


class Keyring:
    """All API keys that the server knows now."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self.keys = tuple(keys)
        self.named = {key.name: key for key in keys}
        self._digests = [(bytes.fromhex(key.sha256), key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, shown: str) -> Key | None:
        """Return the one that a client shows. How long it takes says nothing about any of them."""
        digest = hashlib.sha256(shown.encode(errors="surrogateescape")).digest()
        found = None
        for own, key in self._digests:
            if hmac.compare_digest(own, digest):
                found = key
        return found


def read_keys(path: str | None, environ: Mapping[str, str] = os.environ) -> list[Key]:
    """Return those of a file and of the environment; none of either: the server asks for none.

    A YAML file has a list `keys`; any other one key a line. Raises `ConfigError`, which quotes no
    key.
    """
    keys: list[Key] = []
    if path is not None:
        _warn_of_readers(Path(path))
        keys += _read_yaml(Path(path)) if path.endswith((".yaml", ".yml")) else _read_lines(path)
        if not keys:
            raise ConfigError(f"keys file {path} has no key: every request would be refused")
    if ENVIRONMENT in environ:
        shown = [part.strip() for part in environ[ENVIRONMENT].split(",")]
        keys += (_of(key, f"key {i} of {ENVIRONMENT}") for i, key in enumerate(shown, 1))
    for what in ("name", "sha256"):
        seen: set[str] = set()
        for key in keys:
            if getattr(key, what) in seen:
                twice = "is the name of two" if what == "name" else "is there twice"
                raise ConfigError(f"keys: {key.name!r} {twice}")
            seen.add(getattr(key, what))
    return keys


def _read_yaml(path: Path) -> Iterator[Key]:
    from aioserve.support.files import read_struct

    for i, entry in enumerate(read_struct(path, "keys file", _File).keys, 1):
        where = f"key {i} of {path}"
        if (entry.key is None) == (entry.sha256 is None):
            raise ConfigError(f"{where} must have either key or sha256")
        rights = {name: getattr(entry, name) for name in Rights.__struct_fields__}
        if entry.key is not None:
            key = _of(entry.key, where)
            yield msgspec.structs.replace(key, name=entry.name or key.name, **rights)
        elif entry.sha256 is not None:
            name = entry.name or _name_of(entry.sha256)
            yield Key(name=name, sha256=entry.sha256, **rights)


def _read_lines(path: str) -> list[Key]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read keys file {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"keys file {path} is not text in UTF-8") from None
    shown = {i: line.strip() for i, line in enumerate(lines, 1)}
    return [
        _of(key, f"line {i} of {path}")
        for i, key in shown.items()
        if key and not key.startswith("#")
    ]


def _of(key: str, where: str) -> Key:
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where} must be printable ASCII characters without spaces")
    if len(key) < SHORT_KEY:
        logger.warning("%s has fewer than %d characters: it can be guessed", where, SHORT_KEY)
    digest = hashlib.sha256(key.encode()).hexdigest()
    return Key(name=_name_of(digest), sha256=digest)


def _name_of(digest: str) -> str:
    return f"key-{digest[:8]}"


def _warn_of_readers(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read keys file {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning(
            "keys file %s can be read or written by others (mode %o): chmod 600", path, mode & 0o777
        )


# What a request may take of the limits of its key.


#: Gives the place of a request back before its block ends; the second time nothing happens. After
#: it another request of the key is let in, wherever it comes: it is awaited before the client hears
#: the end.
Leave = Callable[[], Awaitable[None]]


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """The most that one HTTP request may take of its key's limits, as its body says."""

    num_sequences: int = 1  # that run at once: prompts, times samples of each
    num_tokens: int = 0  # of its prompts and of outputs as long as they may get
    is_one: bool = True  # it is one sequence, and cannot be asked for in parts
    request_id: str = ""  # ids of its sequences begin with it


#: What a request that is one sequence holds of a key's seats, and of no tokens before it has them.
ONE = Claim()


class Entrance(Protocol):
    """The entrance at which requests of keys are let in, wherever they are counted."""

    def entered(self, name: str, claim: Claim) -> AbstractAsyncContextManager[Leave]:
        """Inside the block one more request of that key runs. Raises `KeyLimitError` for one that
        has to wait, `ForbiddenError` for one that the key may never have.
        """
