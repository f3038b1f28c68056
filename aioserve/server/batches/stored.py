"""What is kept of a file and of a batch, how it gets on the disk, and back.

Each object is written beside its place and renamed, so that it is there as a whole or not at all.
"""

import logging
import os
import re
import secrets
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from aioserve.errors import UNREADABLE
from aioserve.server.batches.protocol import Batch, FileObject

logger = logging.getLogger(__name__)

T = TypeVar("T")

encoder = msgspec.json.Encoder()


class StoredFile(msgspec.Struct, kw_only=True):
    """What is stored of a file: what clients are told, and its owner."""

    owner: str  # the name of the key that it was made with; "": there are no keys
    file: FileObject

    def is_for(self, reach: str) -> bool:
        """Whether a client that reaches the owner `reach`, "" for all, may see it."""
        return reach in ("", self.owner)


class StoredBatch(msgspec.Struct, kw_only=True):
    """What is stored of a batch: what clients are told, its owner and the files to come."""

    owner: str
    batch: Batch
    output_id: str  # of the files that it will leave
    errors_id: str
    output_seconds: int | None = None  # for which these are kept; None: as all files

    def is_for(self, reach: str) -> bool:
        """Whether a client that reaches the owner `reach`, "" for all, may see it."""
        return reach in ("", self.owner)


files = msgspec.json.Decoder(StoredFile)
batches = msgspec.json.Decoder(StoredBatch)


def make_id(kind: str) -> str:
    """A new id, which sorts by the time at which it was made."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(8)}"


def is_id(text: str, kind: str) -> bool:
    """Whether a text can be an id of that kind, and so the name of a file."""
    return re.fullmatch(f"{kind}[0-9a-f]{{32}}", text) is not None


def private(path: str, flags: int) -> int:
    """Opens a file that no other user of the machine may read."""
    return os.open(path, flags, 0o600)


def write_whole(path: Path, data: bytes, *, synced: bool = True) -> None:
    """Write a file, in place of the one that is there, all at once."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open(beside, "xb", opener=private) as file:
            file.write(data)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if synced:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Have the disk know of new names in it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    """None if it is not there, or is not what is kept here: that is said, and nothing else."""
    try:
        return decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        logger.error("%s cannot be read: %s", path, error)
        return None
