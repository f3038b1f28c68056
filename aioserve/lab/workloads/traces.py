"""Traces of real traffic, by their formats: which one a file has is read from its first line.

A broken line is named by file and number. Knows formats; knows nothing about serving.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aioserve.engine.delivery.request_log import RequestLogLine
from aioserve.errors import ConfigError
from aioserve.lab.workloads.block_traces import read_bailian, read_mooncake, read_weka
from aioserve.lab.workloads.csv_traces import Reader, csv_reader, has_no_arrivals
from aioserve.lab.workloads.trace_lines import json_lines
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, text_name

SUFFIXES = (".csv", ".jsonl")


def read_trace(path: str | Path, seed: int = 0, rate: float | None = None) -> Workload:
    """The workload in a `.csv` or `.jsonl` file; arrivals count from the first one.

    `seed` chooses the token ids. Of a file without arrivals, requests (or the sessions of agents)
    come at random, `rate` a second on average, as the seed says. Raises `ConfigError` that names
    file and line, or what is missing.
    """
    path = Path(path)
    try:
        text = _without_torn_end(path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not UTF-8 text: {error}") from error
    lines = text.splitlines()
    is_csv = path.suffix == ".csv"
    read = csv_reader(path, lines) if is_csv else _jsonl_reader(lines)
    requests = list(read(path, lines, seed))
    if not requests:
        raise ConfigError(f"trace {path} has no requests")
    lacks_arrivals = has_no_arrivals(lines) if is_csv else read is read_weka
    if lacks_arrivals != (rate is not None):
        raise ConfigError(
            f"trace {path} does not say when requests come: give compare, search or sweep --rate R"
            if lacks_arrivals
            else f"trace {path} says when requests come: --rate is for files that do not "
            "(--time-scale changes the speed)"
        )
    if rate is not None:
        requests = _at_random(requests, rate, random.Random(f"{seed} arrivals"))
    elif all(request.follows < 0 for request in requests):
        requests.sort(key=lambda request: request.arrival)
    first = min(request.arrival for request in requests if request.follows < 0)
    return Workload(
        path.name,
        tuple(
            r if r.follows >= 0 else msgspec.structs.replace(r, arrival=r.arrival - first)
            for r in requests
        ),
        seed=seed,
        is_trace=rate is None,
    )


def _without_torn_end(data: bytes) -> bytes:
    """A request log without the line that its server was writing when it was killed."""
    whole, newline, last = data.rpartition(b"\n")
    if newline and last and data.startswith(b'{"arrival":'):
        try:
            msgspec.json.decode(last)
        except (msgspec.DecodeError, UnicodeError):
            return whole + newline
    return data


def _at_random(
    requests: list[WorkloadRequest], rate: float, rng: random.Random
) -> list[WorkloadRequest]:
    """The requests with arrivals of a Poisson process; those of one program come as far apart as
    they are.
    """
    found, now, last = [], 0.0, -1
    for request in requests:
        if request.follows < 0:
            if request.program < 0 or request.program != last:
                now += rng.expovariate(rate)
            last = request.program
            request = msgspec.structs.replace(request, arrival=now + request.arrival)
        found.append(request)
    return found


def _jsonl_reader(lines: list[str]) -> Reader:
    """Which of the kinds of JSONL it is: the first line says."""
    first = next(filter(None, map(str.strip, lines)), "")
    if '"parent_chat_id"' in first:
        return read_bailian
    if '"input_length"' in first:
        return read_mooncake
    return read_weka if '"requests"' in first else read_request_log


def read_request_log(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Requests of a log that `serve` has written."""
    for where, line in json_lines(path, lines, RequestLogLine):
        yield WorkloadRequest(
            line.arrival,
            (Piece(text_name("log", seed, where), line.prompt_tokens),),
            max(line.output_tokens, 1),  # a prompt that is pooled costs as much as with one token
            priority=line.priority,
            user=line.user,
            timeout=line.timeout,
        )
