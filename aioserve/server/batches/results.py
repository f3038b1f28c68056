"""The answers of a batch on disk: two files that only grow, and what they hold after a crash.

A line that is whole in one of them is answered: it is not run again. What a crash or a full disk
has cut off is written over. Blocks, so it runs in threads, one call at a time.
"""

import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from aioserve.errors import UNREADABLE
from aioserve.server.batches.lines import paced


class _Named(msgspec.Struct):
    """A result; its answer, which may be large, is checked to be JSON and not kept."""

    custom_id: str


_named = msgspec.json.Decoder(_Named)


class Answered(NamedTuple):
    """A line of the input, and the line about it."""

    number: int
    is_error: bool
    result: bytes  # with its newline


class _OneFile:
    """What was written whole, and what comes after."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def recover(self) -> Iterator[str]:
        """The `custom_id` of every whole line. What comes after the last whole line, such as what a
        power failure has left, is cut off.
        """
        with open(self.path, "rb") as file:
            for raw in paced(file):
                try:
                    result = _named.decode(raw.decode()) if raw.endswith(b"\n") else None
                except UNREADABLE:
                    result = None
                if result is None:
                    break
                self.size += len(raw)
                yield result.custom_id
        os.ftruncate(self._file, self.size)

    def write(self, data: bytes) -> None:
        """Raises `OSError`: then it can be written again, in the same place."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], self.size + done)
        self.size += len(data)

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)


class ResultLog:
    """Both files: lines whose status is below 400, and the others."""

    def __init__(self, output: Path, errors: Path, sync_seconds: float) -> None:
        self.output = _OneFile(output)
        try:
            self.errors = _OneFile(errors)
        except OSError:
            self.output.close()
            raise
        self._sync_seconds = sync_seconds
        self._synced_at = time.monotonic()
        self._taken: set[bool] = set()  # of answers that failed half-way: the kinds that are in
        #: Set where the disk holds more than it may: no answer is written then, until the end.
        self.is_full = False
        self.is_ending = False

    def recover(self) -> tuple[list[str], list[str]]:
        """The `custom_id` of the lines that were answered, and of those that have failed."""
        return list(self.output.recover()), list(self.errors.recover())

    def write(self, answered: Sequence[Answered], *, synced: bool = False) -> None:
        """Keep these answers. Raises `OSError` if the disk does not take them, or may not: to be
        called again with the same ones.
        """
        if self.is_full and not self.is_ending:
            raise OSError(errno.EDQUOT, "batches.max_batch_gib or max_batch_share is used up")
        for file, is_error in ((self.output, False), (self.errors, True)):
            todo = [a for a in answered if a.is_error is is_error]
            if todo and is_error not in self._taken:
                file.write(b"".join(a.result for a in todo))
                self._taken.add(is_error)
        if synced or time.monotonic() - self._synced_at >= self._sync_seconds:
            self.output.sync()
            self.errors.sync()
            self._synced_at = time.monotonic()
        self._taken.clear()

    def close(self) -> None:
        self.output.close()
        self.errors.close()


def result_id(batch_id: str, number: int) -> str:
    """The id of the result of the line of that number."""
    return f"batch_req_{batch_id.removeprefix('batch_')}-{number}"
