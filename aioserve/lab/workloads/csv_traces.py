"""Traces of lengths in CSV: Azure's, BurstGPT's, and lists of lengths such as Sarathi-Serve's.

The columns say which of them it is. Texts are unknown, so each prompt is a text of its own.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from aioserve.engine.delivery.request_log import Count
from aioserve.errors import ConfigError, one_line
from aioserve.lab.workloads.trace_lines import Seconds, csv_rows
from aioserve.lab.workloads.workload import Piece, WorkloadRequest, text_name

AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
BURSTGPT_COLUMNS = ["Timestamp", "Request tokens", "Response tokens"]
LENGTH_COLUMNS = ["num_prefill_tokens", "num_decode_tokens"]
OUTCOME_COLUMNS = ["arrival_s", "client", "prompt_tokens", "output_tokens"]

Reader = Callable[[Path, list[str], int], Iterator[WorkloadRequest]]


class AzureLine(msgspec.Struct):
    """A row of the Azure LLM inference traces (2023 and 2024)."""

    TIMESTAMP: str
    ContextTokens: Count
    GeneratedTokens: Count


class BurstGptLine(msgspec.Struct):
    """A row of the BurstGPT traces; the third one has sessions. Without tokens it has failed."""

    timestamp: Seconds = msgspec.field(name="Timestamp")
    prompt_tokens: int = msgspec.field(name="Request tokens")
    output_tokens: int = msgspec.field(name="Response tokens")
    log_type: str = msgspec.field(name="Log Type", default="")  # Conversation log, or API log
    session: str = msgspec.field(name="Session ID", default="")


class LengthLine(msgspec.Struct):
    """A row of the lists of Sarathi-Serve; Vidur's have arrivals as well, in seconds."""

    num_prefill_tokens: Count
    num_decode_tokens: Count
    arrived_at: Seconds | None = None


class OutcomeLine(msgspec.Struct):
    """A row of outcomes, of which a workload takes what came and not what became of it."""

    arrival_s: Seconds
    client: str
    prompt_tokens: Count
    output_tokens: Count


def csv_reader(path: Path, lines: list[str]) -> Reader:
    """Which of the kinds of CSV it is: the columns say. Raises `ConfigError`."""
    header = [name.strip() for name in (lines[0] if lines else "").split(",")]
    for columns, reader in (
        (AZURE_COLUMNS, read_azure),
        (BURSTGPT_COLUMNS, read_burstgpt),
        (LENGTH_COLUMNS, read_lengths),
        (OUTCOME_COLUMNS, read_outcome_arrivals),
    ):
        if set(columns) <= set(header):
            return reader
    raise ConfigError(
        f"{path}:1: expected the columns {','.join(AZURE_COLUMNS)} (Azure), "
        f"{','.join(BURSTGPT_COLUMNS)} (BurstGPT), {','.join(LENGTH_COLUMNS)} (lengths, as "
        f"Sarathi-Serve's) or {','.join(OUTCOME_COLUMNS)} (outcomes, as for calibrate), got "
        f"{','.join(header)!r}"
    )


def read_azure(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Requests of an Azure trace."""
    for where, line in csv_rows(path, lines, AzureLine):
        try:
            arrival = datetime.fromisoformat(line.TIMESTAMP).timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise ConfigError(f"{where}: {one_line(error)}") from error
        text = text_name("azure", seed, int(where.rpartition(":")[2]))
        yield WorkloadRequest(arrival, (Piece(text, line.ContextTokens),), line.GeneratedTokens)


def read_burstgpt(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Requests of a BurstGPT trace that were answered, by their log type as class. They come when
    they came: what the turns of a session have in common is not told.
    """
    sessions: dict[str, int] = {}
    for where, line in csv_rows(path, lines, BurstGptLine):
        if line.prompt_tokens < 0 or line.output_tokens < 0:
            raise ConfigError(f"{where}: a number of tokens is below 0")
        if line.prompt_tokens and line.output_tokens:
            is_alone = line.session in ("", "nan")
            session = -1 if is_alone else sessions.setdefault(line.session, len(sessions))
            yield WorkloadRequest(
                line.timestamp,
                (Piece(text_name("burstgpt", seed, where), line.prompt_tokens),),
                line.output_tokens,
                kind=line.log_type,
                session=session,
            )


def read_lengths(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Requests of a list of lengths, which come when the file says, or else all at once."""
    arrivals = []
    for where, line in csv_rows(path, lines, LengthLine):
        arrivals.append(line.arrived_at)
        if (line.arrived_at is None) != (arrivals[0] is None):
            raise ConfigError(f"{where}: arrived_at is stated for some rows and not for others")
        yield WorkloadRequest(
            line.arrived_at or 0.0,
            (Piece(text_name("lengths", seed, where), line.num_prefill_tokens),),
            line.num_decode_tokens,
        )


def read_outcome_arrivals(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Requests of a file of outcomes, such as `calibrate --outcomes` and `reproduce` take."""
    for where, line in csv_rows(path, lines, OutcomeLine):
        yield WorkloadRequest(
            line.arrival_s,
            (Piece(text_name("outcome", seed, where), line.prompt_tokens),),
            line.output_tokens,
            user=line.client,
        )


def has_no_arrivals(lines: list[str]) -> bool:
    """Whether a CSV file is a list of lengths without arrivals."""
    header = [name.strip() for name in (lines[0] if lines else "").split(",")]
    return set(LENGTH_COLUMNS) <= set(header) and "arrived_at" not in header
