"""Reads outcomes: a CSV with one row per request that some server has served.

The columns are arrival_s, client, prompt_tokens, output_tokens, ttft_s and latency_s. Knows the
format, and nothing about what the times mean.
"""

import csv
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError, one_line
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, text_name

Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class Outcome(msgspec.Struct, frozen=True):
    """One request: when it came, what it was, and when its tokens came, in seconds."""

    arrival_s: Seconds
    client: str
    prompt_tokens: Count
    output_tokens: Count  # of the whole reply
    ttft_s: Seconds  # from the arrival to the first token
    latency_s: Seconds  # from the arrival to the last token

    @property
    def first(self) -> float:
        """When the first token came, in seconds since the start."""
        return self.arrival_s + self.ttft_s

    @property
    def end(self) -> float:
        """When the last token came, in seconds since the start."""
        return self.arrival_s + self.latency_s


def read_outcomes(path: str | Path, *, extra_prompt_tokens: int = 0) -> list[Outcome]:
    """The requests of a file in order of arrival, their prompts `extra_prompt_tokens` longer than
    the file says (what a server puts around a prompt). Raises `ConfigError` with file and line.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            return _read(str(path), csv.DictReader(file), extra_prompt_tokens)
    except OSError as error:
        raise ConfigError(f"cannot read outcomes {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"outcomes {path} is not UTF-8 text: {error}") from error


def _read(path: str, rows: "csv.DictReader[str]", extra: int) -> list[Outcome]:
    wanted = list(Outcome.__struct_fields__)
    if missing := set(wanted) - set(rows.fieldnames or ()):
        lacks = ",".join(sorted(missing))
        raise ConfigError(f"{path}:1: expected the columns {','.join(wanted)}; it lacks {lacks}")
    found = []
    for row in rows:
        where = f"{path}:{rows.line_num}"
        try:
            outcome = msgspec.convert({name: row[name] for name in wanted}, Outcome, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {one_line(error)}") from error
        if outcome.latency_s < outcome.ttft_s:
            raise ConfigError(f"{where}: the last token came before the first")
        prompt_tokens = outcome.prompt_tokens + extra
        found.append(msgspec.structs.replace(outcome, prompt_tokens=prompt_tokens))
    if not found:
        raise ConfigError(f"outcomes {path} has no requests")
    return sorted(found, key=lambda outcome: outcome.arrival_s)


def as_workload(outcomes: list[Outcome], name: str, seed: int = 0) -> Workload:
    """The requests as a workload: what came, without what became of it. Every prompt is a text of
    its own, and every client states the length of the reply as its limit, since the servers that
    such logs are of were told it.
    """
    return Workload(
        name,
        tuple(
            WorkloadRequest(
                outcome.arrival_s,
                (Piece(text_name("outcome", seed, place), outcome.prompt_tokens),),
                outcome.output_tokens,
                user=outcome.client,
                max_tokens=outcome.output_tokens,
            )
            for place, outcome in enumerate(outcomes)
        ),
        seed=seed,
        is_trace=True,
    )
