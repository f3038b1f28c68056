"""Traces of real traffic, by their formats: which one a file has is read from its first line.

A broken line is named by file and number. Knows formats; knows nothing about serving.
"""

import csv
import gzip
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from aioserve.engine.request_log import Count, RequestLogLine
from aioserve.errors import UNREADABLE, ConfigError, one_line
from aioserve.lab.workloads.workload import (
    Piece,
    Reading,
    Workload,
    WorkloadRequest,
    text_name,
)

T = TypeVar("T")
Line = TypeVar("Line", bound=msgspec.Struct)
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


def _header(path: Path, lines: list[str]) -> list[str]:
    """Return the names of the columns, as the first line has them. Raises `ConfigError`."""
    _, names = next(_rows(path, lines[:1]), ("", []))
    return [name.strip() for name in names]


def csv_rows(path: Path, lines: list[str], kind: type[Line]) -> Iterator[tuple[str, Line]]:
    """Yield rows with where they stand, empty ones left out; columns that `kind` has no field for
    are skipped, and may be missing at the end of a row. Raises `ConfigError`.
    """
    header: list[str] | None = None
    for where, row in _rows(path, lines):
        if header is None:
            header = [name.strip() for name in row]
            continue
        if lacking := set(header[len(row) :]) & set(kind.__struct_encode_fields__):
            raise ConfigError(
                f"{where}: expected {len(header)} columns, got {len(row)}; the row lacks "
                f"{','.join(sorted(lacking))}"
            )
        cells = dict(zip(header, map(str.strip, row), strict=False))
        try:
            yield where, msgspec.convert(cells, kind, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {one_line(error)}") from error


def read_table(path: Path, kind: type[Line], what: str) -> Iterator[tuple[str, Line]]:
    """Yield the rows of a CSV file that has all columns of `kind`, with where they stand; one whose
    name ends in `.gz` is unpacked. `what` the file is goes into messages. Raises `ConfigError`.
    """
    unpack: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with unpack(path, "rt", encoding="utf-8-sig", newline="") as file:
            lines: list[str] = list(file)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {what} {path}: {why}") from error
    wanted = kind.__struct_fields__
    if missing := set(wanted) - set(_header(path, lines)):
        raise ConfigError(
            f"{what} {path}:1: expected the columns {','.join(wanted)}; it lacks "
            f"{','.join(sorted(missing))}"
        )
    yield from csv_rows(path, lines, kind)


# Traces of lengths in CSV: Azure's, BurstGPT's, and lists of lengths such as Sarathi-Serve's. The
# columns say which of them it is. Texts are unknown, so each prompt is a text of its own.


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
    """Return which of the kinds of CSV it is: the columns say. Raises `ConfigError`."""
    header = _header(path, lines)
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
        f"{','.join(header)!r}; --columns arrival=COLUMN,prompt=COLUMN,output=COLUMN reads a "
        "table of any columns"
    )


def read_azure(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests of an Azure trace."""
    for where, line in csv_rows(path, lines, AzureLine):
        try:
            arrival = datetime.fromisoformat(line.TIMESTAMP).timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise ConfigError(f"{where}: {one_line(error)}") from error
        text = text_name("azure", seed, int(where.rpartition(":")[2]))
        yield WorkloadRequest(arrival, (Piece(text, line.ContextTokens),), line.GeneratedTokens)


def read_burstgpt(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests of a BurstGPT trace that were answered, by their log type as class. They come
    when they came: what the turns of a session have in common is not told.
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
    """Yield requests of a list of lengths, which come when the file says, or else all at once."""
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
    """Yield requests of a file of outcomes, such as `calibrate --outcomes` and `reproduce` take."""
    for where, line in csv_rows(path, lines, OutcomeLine):
        yield WorkloadRequest(
            line.arrival_s,
            (Piece(text_name("outcome", seed, where), line.prompt_tokens),),
            line.output_tokens,
            user=line.client,
        )


# Traces whose prompts are named block by block: Mooncake's, Qwen-Bailian's, and Weka's of agents.
# Equal names are equal blocks of tokens, so prefixes are shared as they were. The last two say
# which request came after which, and when is left to the simulation.


MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
BAILIAN_BLOCK = 16
ROOT = -1  # the parent of a request that begins a conversation


class MooncakeLine(msgspec.Struct):
    """A line of the Mooncake traces; equal `hash_ids` mean equal blocks of 512 prompt tokens."""

    timestamp: Seconds  # milliseconds
    input_length: Count
    output_length: Count
    hash_ids: list[int]


class BailianLine(msgspec.Struct):
    """A line of the Qwen-Bailian traces; equal `hash_ids` mean equal blocks of 16 prompt tokens."""

    chat_id: int
    parent_chat_id: int  # -1: it begins a conversation
    timestamp: Seconds
    input_length: Count
    output_length: Annotated[int, Meta(ge=0)]
    type: str  # text, search, image, file
    turn: int
    hash_ids: list[int]


class WekaCall(msgspec.Struct):
    """One call of a model by an agent, or the calls of a helper that it started."""

    type: str  # "s" streams, "n" does not; "subagent" has calls of its own in `requests`
    t: Seconds = 0.0  # since the session began
    prompt_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    api_time: Seconds = 0.0  # that the call took
    think_time: Seconds | None = None  # from the end of the call before to this one
    requests: "list[WekaCall]" = []


class WekaSession(msgspec.Struct):
    """One session of a coding agent, as the traces of Weka's kv-cache-tester have it."""

    id: str
    requests: list[WekaCall]
    block_size: Annotated[int, Meta(ge=1)] = 64
    hash_id_scope: str = "local"  # "global": equal ids are equal blocks in all sessions


def read_mooncake(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests of a Mooncake trace, which come when they came."""
    for where, line in json_lines(path, lines, MooncakeLine):
        blocks, rest = divmod(line.input_length, MOONCAKE_BLOCK)
        if len(line.hash_ids) != blocks + (rest > 0):
            raise ConfigError(
                f"{where}: {line.input_length} tokens are {blocks + (rest > 0)} blocks of "
                f"{MOONCAKE_BLOCK}, but there are {len(line.hash_ids)} hash_ids"
            )
        pieces = _pieces(("mooncake", seed), line.hash_ids, MOONCAKE_BLOCK, line.input_length, "")
        # The first block is a prompt of the system, the same for all: the next one is theirs.
        session = pieces[min(1, len(pieces) - 1)].text if pieces else -1
        yield WorkloadRequest(line.timestamp / 1e3, pieces, line.output_length, session=session)


def read_bailian(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests of a Qwen-Bailian trace; their type is their class and a hint. A turn comes
    after the end of its parent, by the time between the two arrivals: when replies ended is not
    told.
    """
    found = sorted(json_lines(path, lines, BailianLine), key=lambda pair: pair[1].timestamp)
    places: dict[int, int] = {}
    root: list[int] = []  # of each, where its conversation began
    for place, (where, line) in enumerate(found):
        if line.chat_id in places:
            raise ConfigError(f"{where}: chat_id {line.chat_id} is there twice")
        _check_blocks(where, line.hash_ids, BAILIAN_BLOCK, line.input_length)
        parent = places.get(line.parent_chat_id, ROOT)
        before = 0.0 if parent < 0 else found[parent][1].timestamp
        root.append(place if parent < 0 else root[parent])
        places[line.chat_id] = place
        yield WorkloadRequest(
            line.timestamp - before,
            _pieces(("bailian", seed), line.hash_ids, BAILIAN_BLOCK, line.input_length, where),
            max(line.output_length, 1),
            kind=line.type,
            hints={"type": line.type},
            follows=parent,
            session=root[place],
        )


def read_weka(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests of sessions of agents, a program each, all of which begin at once: a call
    comes after the one before, a helper's first call after the one that started it, and the call
    after the helpers when all of them have ended. Pauses are those of the trace.
    """
    place = 0
    for number, (where, session) in enumerate(json_lines(path, lines, WekaSession)):
        for request in _Session(session, where, seed, place, number).requests():
            yield request
            place += 1


class _Session:
    """One session, whose requests stand from `begin` on in the workload."""

    def __init__(
        self, session: WekaSession, where: str, seed: int, begin: int, number: int
    ) -> None:
        self._session, self._where, self._begin, self._number = session, where, begin, number
        scope = "" if session.hash_id_scope == "global" else f"{number} {session.id}"
        self._names = ("weka", seed, scope)
        self._made: list[WorkloadRequest] = []
        self._ends: list[float] = []  # of the calls, as they were recorded

    def requests(self) -> list[WorkloadRequest]:
        """Return the requests in the order of the file. Raises `ConfigError`."""
        last: tuple[int, ...] = ()
        joined: tuple[int, ...] = ()  # last calls of helpers that nobody has waited for yet
        for call in self._session.requests:
            if call.type != "subagent":
                last, joined = self._call(call, "agent", last + joined), ()
                continue
            own = last
            for inner in call.requests:
                if inner.type == "subagent":
                    raise ConfigError(f"{self._where}: a helper starts a helper: not supported")
                own = self._call(inner, "helper", own)
            joined += own if call.requests else ()
        return self._made

    def _call(self, call: WekaCall, kind: str, after: tuple[int, ...]) -> tuple[int, ...]:
        place = len(self._made)
        where = f"{self._where}: call {place + 1}"
        if call.prompt_tokens < 1 or call.output_tokens < 0:
            raise ConfigError(
                f"{where}: expected at least 1 token in and 0 out, got {call.prompt_tokens} and "
                f"{call.output_tokens}"
            )
        size = self._session.block_size
        _check_blocks(where, call.hash_ids, size, call.prompt_tokens)
        pause = call.t
        if after:
            pause = max(0.0, call.t - max(self._ends[i] for i in after))
            if call.think_time is not None and len(after) == 1:
                pause = call.think_time
        waits_for = [self._begin + i for i in after]
        self._made.append(
            WorkloadRequest(
                pause,
                _pieces(self._names, call.hash_ids, size, call.prompt_tokens, where),
                max(call.output_tokens, 1),
                follows=waits_for[0] if waits_for else -1,
                after=tuple(waits_for[1:]),
                kind=kind,
                session=self._number,
                program=self._number,
            )
        )
        self._ends.append(call.t + call.api_time)
        return (place,)


def _check_blocks(where: str, hash_ids: Sequence[int], size: int, length: int) -> None:
    if len(hash_ids) > -(-length // size):
        raise ConfigError(
            f"{where}: {length} tokens are {-(-length // size)} blocks of {size}, but there are "
            f"{len(hash_ids)} hash_ids"
        )


def _pieces(
    names: tuple[str | int, ...], hash_ids: Sequence[int], size: int, length: int, rest: str
) -> tuple[Piece, ...]:
    """Return a prompt of `length` tokens: a piece for each block, the last of which may be shorter;
    what has no block is a text of its own, named by `rest`.
    """
    pieces = [
        Piece(text_name(*names, name), min(size, length - i * size))
        for i, name in enumerate(hash_ids)
    ]
    if (left := length - size * len(hash_ids)) > 0:
        pieces.append(Piece(text_name(*names, rest), left))
    return tuple(pieces)


# The file itself: its text, which format it has, and when its requests come.


def read_trace(
    path: str | Path, seed: int = 0, rate: float | None = None, reading: Reading | None = None
) -> Workload:
    """Return the workload in a `.csv`, `.jsonl` or `.json` file; arrivals count from the first one.

    `seed` chooses the token ids. Of a file without arrivals, requests (or the sessions of agents)
    come at random, `rate` a second on average, as the seed says. `reading` is what the file does
    not say of itself. Raises `ConfigError` that names file and line, or what is missing.
    """
    path = Path(path)
    try:
        text = _without_torn_end(path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is not UTF-8 text: {error}") from error
    requests, has_arrivals = _read(path, text, seed, reading or Reading())
    if not requests:
        raise ConfigError(f"trace {path} has no requests")
    if has_arrivals == (rate is not None):
        raise ConfigError(
            f"trace {path} says when requests come: --rate is for files that do not "
            "(--time-scale changes the speed)"
            if has_arrivals
            else f"trace {path} does not say when requests come: give compare, search or sweep "
            "--rate R"
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


def _read(path: Path, text: str, seed: int, reading: Reading) -> tuple[list[WorkloadRequest], bool]:
    """Return the requests in the order of the file, and whether it says when they came."""
    lines = text.splitlines()
    read = None if reading.columns else _reader(path, lines)
    if read is None:
        from aioserve.lab.workloads.datasets import read_dataset

        return read_dataset(path, text, seed, reading)
    if reading != Reading():
        raise ConfigError(f"{path} states lengths: --tokenizer and --think are for texts and chats")
    header = lines[0] if lines else ""
    has_arrivals = read is not read_weka and (read is not read_lengths or "arrived_at" in header)
    return list(read(path, lines, seed)), has_arrivals


def _reader(path: Path, lines: list[str]) -> Reader | None:
    """Return which of the formats of this module a file has, by its first line; None: none."""
    if path.suffix == ".csv":
        return csv_reader(path, lines)
    first = next(filter(None, map(str.strip, lines)), "")
    if path.suffix == ".json":
        return None
    for key, read in (
        ('"parent_chat_id"', read_bailian),
        ('"input_length"', read_mooncake),
        ('"requests"', read_weka),
        ('"arrival"', read_request_log),
    ):
        if key in first:
            return read
    return None if first else read_request_log


def _without_torn_end(data: bytes) -> bytes:
    """Return a request log without the line that its server was writing when it was killed."""
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
    """Return the requests with arrivals of a Poisson process; those of one program come as far
    apart as they are.
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


def read_request_log(path: Path, lines: list[str], seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests of a log that `serve` has written."""
    for where, line in json_lines(path, lines, RequestLogLine):
        yield WorkloadRequest(
            line.arrival,
            (Piece(text_name("log", seed, where), line.prompt_tokens),),
            max(line.output_tokens, 1),  # a prompt that is pooled costs as much as with one token
            priority=line.priority,
            user=line.user,
            timeout=line.timeout,
        )
