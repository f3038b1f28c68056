"""The input of a batch: where its lines are, what is wrong with them, and each of them again.

Lines stay on the disk; what is kept of each is where it begins and how long it is. Blocks, so it
runs in threads; a long file is looked at a little at a time, so that the event loop, which shares
the interpreter, goes on beside it.
"""

import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from aioserve.errors import UNREADABLE
from aioserve.server.batches.protocol import BatchError, Line

MAX_ERRORS = 100  # most errors that are told of one input
PIECE = 2**18  # bytes in a row, and then a pause; a line counts as LINE_BYTES more
LINE_BYTES = 2**12
PAUSE_SECONDS = 0.001

_line = msgspec.json.Decoder(Line)


class _Head(msgspec.Struct):
    """A body is an object; its route looks at what is in it."""


_head = msgspec.json.Decoder(_Head)


class Lines:
    """The lines of an input that was looked through."""

    def __init__(self, path: Path) -> None:
        self.offsets = array("Q")
        self.lengths = array("I")
        self.numbers: dict[str, int] = {}  # by custom_id, until they are forgotten
        self.errors: list[BatchError] = []
        self._file = os.open(path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, number: int) -> Line:
        """The line of that number, from 0."""
        return _line.decode(os.pread(self._file, self.lengths[number], self.offsets[number]))

    def close(self) -> None:
        """Close the input; nothing can be read afterwards. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def look_through(path: Path, endpoint: str, *, max_lines: int, max_bytes: int) -> Lines:
    """All lines, with `errors` for those that no batch of `endpoint` may have; `max_bytes` is the
    limit of one of them. Empty lines are passed over.
    """
    lines = Lines(path)
    try:
        _note_all(lines, path, endpoint, max_lines, max_bytes)
    except BaseException:
        lines.close()
        raise
    if not lines and not lines.errors:
        lines.errors.append(BatchError(code="empty_file", message="the input file has no lines"))
    return lines


def paced(file: BinaryIO, max_bytes: int = -1) -> Iterator[bytes]:
    """The lines of a file, each in pieces of at most `max_bytes`, with a pause now and then: what
    is done with them holds the GIL, and the event loop goes on in the pauses.
    """
    since_pause = 0
    while raw := file.readline(max_bytes):
        since_pause += len(raw) + LINE_BYTES
        if since_pause >= PIECE:
            time.sleep(PAUSE_SECONDS)
            since_pause = 0
        yield raw


def _note_all(lines: Lines, path: Path, endpoint: str, max_lines: int, max_bytes: int) -> None:
    offset = 0
    with open(path, "rb") as file:
        for place, raw in enumerate(paced(file, max_bytes + 1), start=1):
            if raw.strip():
                error = _note(lines, raw, offset, endpoint, max_lines, max_bytes)
                if error is not None:
                    error.line = place
                    lines.errors.append(error)
                    if len(lines.errors) >= MAX_ERRORS or error.code in _LAST:
                        return
            offset += len(raw)


_LAST = ("too_many_lines", "line_too_long")  # what comes after them is not looked at


def _note(
    lines: Lines, raw: bytes, offset: int, endpoint: str, max_lines: int, max_bytes: int
) -> BatchError | None:
    if len(raw) > max_bytes:
        return BatchError(
            code="line_too_long",
            message=f"the line has more than {max_bytes} bytes, the limit of a request here",
        )
    if len(lines) >= max_lines:
        return BatchError(
            code="too_many_lines",
            message=f"the input has more than {max_lines} lines (--max-batch-lines)",
        )
    try:
        line = _line.decode(raw)
        _head.decode(line.body)
    except msgspec.ValidationError as error:
        return BatchError(code="invalid_request", message=str(error))
    except UNREADABLE as error:
        return BatchError(code="invalid_json_line", message=f"the line is not valid JSON: {error}")
    if line.url != endpoint:
        return BatchError(
            code="mismatched_url",
            message=f"url must be {endpoint}, as endpoint of the batch; got {line.url[:64]!r}",
            param="url",
        )
    if line.custom_id in lines.numbers:
        return BatchError(
            code="duplicate_custom_id",
            message=f"custom_id {line.custom_id[:64]!r} is that of an earlier line",
            param="custom_id",
        )
    lines.numbers[line.custom_id] = len(lines)
    lines.offsets.append(offset)
    lines.lengths.append(len(raw))
    return None
