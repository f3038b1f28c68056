"""Traces of real traffic: Azure's CSV, Mooncake's JSONL, and request logs in a JSONL of our own.

A broken line is named by file and number. Knows formats; knows nothing about serving.
"""

import csv
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from aioserve.engine.delivery.request_log import Count, RequestLogLine
from aioserve.errors import UNREADABLE, ConfigError, one_line
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, text_name

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]

Seconds = Annotated[float, Meta(ge=0)]
T = TypeVar("T")


class AzureLine(msgspec.Struct):
    """A row of the Azure LLM inference traces (2023 and 2024)."""

    TIMESTAMP: str
    ContextTokens: Count
    GeneratedTokens: Count


class MooncakeLine(msgspec.Struct):
    """A line of the Mooncake traces; equal `hash_ids` mean equal blocks of 512 prompt tokens."""

    timestamp: Seconds  # milliseconds
    input_length: Count
    output_length: Count
    hash_ids: list[int]


def read_trace(path: str | Path, seed: int = 0) -> Workload:
    """The workload in a `.csv` or `.jsonl` file; arrivals count from the first one.

    `seed` chooses the token ids. Raises `ConfigError` that names file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not UTF-8 text: {error}") from error
    lines = text.splitlines()
    read = _read_azure if path.suffix == ".csv" else _jsonl_reader(path, lines)
    requests = sorted(read(path, lines, seed), key=lambda request: request.arrival)
    if not requests:
        raise ConfigError(f"trace {path} has no requests")
    first = requests[0].arrival
    return Workload(
        path.name,
        tuple(msgspec.structs.replace(r, arrival=r.arrival - first) for r in requests),
        seed=seed,
        is_trace=True,
    )


Reader = Callable[[Path, list[str], int], Iterator[WorkloadRequest]]


def _jsonl_reader(path: Path, lines: list[str]) -> Reader:
    """Which of the two kinds of JSONL it is: the first line says."""
    first = next(filter(None, map(str.strip, lines)), "")
    return _read_mooncake if '"input_length"' in first else _read_request_log


def _read_azure(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    rows = csv.reader(lines)
    header = next(rows, [])
    if header[:3] != AZURE_COLUMNS:
        raise ConfigError(
            f"{path}:1: expected the columns {','.join(AZURE_COLUMNS)}, got {','.join(header)!r}"
        )
    for row in rows:
        if not row:
            continue
        where = f"{path}:{rows.line_num}"
        if len(row) < 3:
            raise ConfigError(f"{where}: expected 3 columns, got {len(row)}")
        try:
            line = msgspec.convert(
                dict(zip(AZURE_COLUMNS, row, strict=False)), AzureLine, strict=False
            )
            arrival = datetime.fromisoformat(line.TIMESTAMP).timestamp()
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"{where}: {one_line(error)}") from error
        text = text_name("azure", seed, rows.line_num)
        yield WorkloadRequest(arrival, (Piece(text, line.ContextTokens),), line.GeneratedTokens)


def _read_mooncake(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    for where, line in _decode(path, lines, MooncakeLine):
        blocks, rest = divmod(line.input_length, MOONCAKE_BLOCK)
        if len(line.hash_ids) != blocks + (rest > 0):
            raise ConfigError(
                f"{where}: {line.input_length} tokens are {blocks + (rest > 0)} blocks of "
                f"{MOONCAKE_BLOCK}, but there are {len(line.hash_ids)} hash_ids"
            )
        lengths = [MOONCAKE_BLOCK] * blocks + [rest] * (rest > 0)
        pieces = tuple(
            Piece(text_name("mooncake", seed, name), length)
            for name, length in zip(line.hash_ids, lengths, strict=True)
        )
        # The first block is a prompt of the system, the same for all: the next one is theirs.
        session = pieces[min(1, len(pieces) - 1)].text if pieces else -1
        yield WorkloadRequest(line.timestamp / 1e3, pieces, line.output_length, session=session)


def _read_request_log(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    for where, line in _decode(path, lines, RequestLogLine):
        yield WorkloadRequest(
            line.arrival,
            (Piece(text_name("log", seed, where), line.prompt_tokens),),
            max(line.output_tokens, 1),  # a prompt that is pooled costs as much as with one token
            priority=line.priority,
            user=line.user,
            timeout=line.timeout,
        )


def _decode(path: Path, lines: list[str], kind: type[T]) -> Iterator[tuple[str, T]]:
    """Lines with where they stand, empty ones left out."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", decoder.decode(line)
            except UNREADABLE as error:
                raise ConfigError(f"{path}:{number}: {one_line(error)}") from error
