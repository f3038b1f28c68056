"""Lines of trace files as data: rows of CSV by the names of their columns, and lines of JSON.

A broken line is named by file and number. Knows no trace.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from aioserve.errors import UNREADABLE, ConfigError, one_line

T = TypeVar("T")
#: Seconds from some moment on; what is larger is no time.
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


def json_lines(path: Path, lines: list[str], kind: type[T]) -> Iterator[tuple[str, T]]:
    """Lines with where they stand, empty ones left out. Raises `ConfigError`."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", decoder.decode(line)
            except UNREADABLE as error:
                raise ConfigError(f"{path}:{number}: {one_line(error)}") from error


def _rows(path: Path, lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    rows = csv.reader(lines)
    try:
        for row in rows:
            if row:
                yield f"{path}:{rows.line_num}", row
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.line_num}: {error}") from error


def csv_rows(path: Path, lines: list[str], kind: type[T]) -> Iterator[tuple[str, T]]:
    """Rows with where they stand, empty ones left out; columns that `kind` has no field for are
    skipped. Raises `ConfigError`.
    """
    header: list[str] | None = None
    for where, row in _rows(path, lines):
        if header is None:
            header = [name.strip() for name in row]
            continue
        if len(row) < len(header):
            raise ConfigError(f"{where}: expected {len(header)} columns, got {len(row)}")
        cells = dict(zip(header, map(str.strip, row), strict=False))
        try:
            yield where, msgspec.convert(cells, kind, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {one_line(error)}") from error
