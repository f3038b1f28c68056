"""Reads a decision log.

Knows frames, checksums and versions. What the records mean together, `chronicle` says.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aioserve.decision_log.records import (
    FORMAT_VERSION,
    MAGIC,
    OLDEST_FORMAT,
    AnyRecord,
    Closed,
    Header,
)
from aioserve.decision_log.writer import FRAME_HEAD, RECORD_HEAD
from aioserve.errors import UNREADABLE, ConfigError, RequestError, one_line


class DecisionLog:
    """A file of records, read anew by every iteration: an hour of them is larger than memory."""

    def __init__(self, path: str | Path) -> None:
        """Raises `ConfigError` if it is no decision log that this version can read."""
        self.path = Path(path)
        self.is_complete = False  # known after an iteration: whether the server closed it
        first = next(self._records(), None)
        if not isinstance(first, Header):
            raise ConfigError(f"decision log {path} ends before its header")
        self.header = first
        try:
            self.config = first.config
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"decision log {path} was written by aioserve {first.version}, whose settings "
                f"this version does not know: {one_line(error)}"
            ) from error

    def __iter__(self) -> Iterator[AnyRecord]:
        """All records after the header. Raises `ConfigError` at what is damaged; a record that
        was being written when the server died is left out.
        """
        records = self._records()
        next(records)
        return records

    def _records(self) -> Iterator[AnyRecord]:
        self.is_complete = False
        decoder = msgspec.msgpack.Decoder(AnyRecord)
        for offset, frame in self._frames():
            view, start = memoryview(frame), 0
            while start < len(view):
                if len(view) - start < RECORD_HEAD.size:
                    raise self._damaged(offset, "a record ends before its length")
                (length,) = RECORD_HEAD.unpack_from(view, start)
                start += RECORD_HEAD.size
                try:
                    record = decoder.decode(view[start : start + length])
                except (RequestError, *UNREADABLE) as error:
                    raise self._damaged(offset, one_line(error)) from error
                start += length
                self.is_complete = isinstance(record, Closed)
                yield record

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                self._check_version(file.readline(100))
                while len(head := file.read(FRAME_HEAD.size)) == FRAME_HEAD.size:
                    offset = file.tell()
                    length, checksum = FRAME_HEAD.unpack(head)
                    body = file.read(length)
                    if len(body) < length:
                        return  # torn: the server died while it wrote
                    if zlib.crc32(body) != checksum:
                        raise self._damaged(offset, "wrong checksum")
                    try:
                        yield offset, zlib.decompress(body)
                    except zlib.error as error:
                        raise self._damaged(offset, str(error)) from error
        except OSError as error:
            raise ConfigError(f"cannot read decision log {self.path}: {error.strerror}") from error

    def _check_version(self, line: bytes) -> None:
        version = line.removeprefix(MAGIC)
        if version == line or not version.strip().isdigit():
            raise ConfigError(f"{self.path} is not a decision log")
        if not OLDEST_FORMAT <= int(version) <= FORMAT_VERSION:
            raise ConfigError(
                f"decision log {self.path} has format {int(version)}; this version of aioserve "
                f"reads formats {OLDEST_FORMAT} to {FORMAT_VERSION}"
            )

    def _damaged(self, offset: int, what: str) -> ConfigError:
        return ConfigError(f"decision log {self.path} is damaged at byte {offset}: {what}")
