"""Traffic as people have it: chats, benchmark results, logs of APIs, tables of any columns.

Which of them a `.json` or `.jsonl` file has is read from its first record; a table is asked for by
its columns. A broken record is named by file and line. Knows formats and tokenizers; knows nothing
about serving.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from aioserve.errors import UNREADABLE, ConfigError, one_line
from aioserve.lab.workloads.workload import Piece, Reading, WorkloadRequest, text_name

T = TypeVar("T", int, float)
LATEST = 1e12  # seconds from some moment on; what is larger is no time
LARGEST = 1e15  # number in a table: milliseconds since 1970 have thirteen digits


class Traffic(NamedTuple):
    """Requests in the order of a file, and whether it says when they came."""

    requests: list[WorkloadRequest]
    has_arrivals: bool


def read_dataset(path: Path, text: str, seed: int, reading: Reading) -> Traffic:
    """Return the traffic of a file: a table if `reading` names its columns, else of the format that
    its first record has. Raises `ConfigError` that names file and line.
    """
    if reading.columns:
        if reading.think is not None:
            raise ConfigError(f"{path}: --think is for chats of ShareGPT, and --columns for tables")
        return read_table(path, text, seed, reading)
    records = _Records(path, text)
    keys = records.first_keys()
    for wanted, read in (
        ({"conversations"}, read_sharegpt),
        ({"input_lens"}, read_benchmark_result),
        ({"request_throughput"}, read_benchmark_result),
        ({"prompt", "output_tokens"}, read_prompts),
        ({"usage"}, read_usages),
        ({"custom_id", "response"}, read_usages),
    ):
        if wanted <= keys:
            if reading.think is not None and read is not read_sharegpt:
                raise ConfigError(f"{path} has no chats of ShareGPT, which --think is for")
            if reading.tokenizer and read in (read_benchmark_result, read_usages):
                raise ConfigError(f"{path} states lengths: --tokenizer is for texts")
            return read(records, seed, reading)
    raise ConfigError(
        f"{path}:1: expected chats of ShareGPT (conversations), a result of vLLM's benchmark "
        "(input_lens), prompts with output_tokens, answers of an OpenAI-shaped API (usage), a "
        "trace (docs/traffic.md) or a request log (arrival), got a record with "
        f"{', '.join(sorted(keys)) or 'no keys'}; --columns arrival=KEY,prompt=KEY,output=KEY "
        "reads records of any keys"
    )


# Records: lines of JSON, or the members of one array. ShareGPT is one array of hundreds of
# megabytes, so each member is decoded when its turn comes.


class _Records:
    """The records of a JSON file, with where each stands."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._data = text.encode()
        self._is_array = text.lstrip()[:1] == "["
        self._is_pretty = path.suffix == ".json" and not self._is_array and not _is_lines(text)

    def raw(self) -> Iterator[tuple[str, bytes]]:
        """Yield each record undecoded, with file and line."""
        if self._is_array:
            yield from self._members()
        elif self._is_pretty:
            yield f"{self.path}:1", self._data
        else:
            for number, line in enumerate(self._data.splitlines(), start=1):
                if line.strip():
                    yield f"{self.path}:{number}", line

    def decoded(self, kind: Any) -> Iterator[tuple[str, Any]]:
        """Yield each record as `kind`. Raises `ConfigError`."""
        decoder = msgspec.json.Decoder(kind)
        for where, raw in self.raw():
            try:
                yield where, decoder.decode(raw)
            except UNREADABLE as error:
                raise ConfigError(f"{where}: {one_line(error)}") from error

    def first_keys(self) -> set[str]:
        """Return the keys of the first record; none if there is none, or if it is no object."""
        for where, raw in self.raw():
            try:
                found = msgspec.json.decode(raw)
            except UNREADABLE as error:
                raise ConfigError(f"{where}: {one_line(error)}") from error
            return set(found) if isinstance(found, dict) else set()
        return set()

    def _members(self) -> Iterator[tuple[str, bytes]]:
        try:
            members = msgspec.json.decode(self._data, type=list[msgspec.Raw])
        except UNREADABLE as error:
            raise ConfigError(f"{self.path}: {one_line(error)}") from error
        line, last, at = 1, 0, 0
        for number, member in enumerate(map(bytes, members), start=1):
            begin = self._data.index(member, at)
            line += self._data.count(b"\n", last, begin)
            last, at = begin, begin + len(member)
            yield f"{self.path}:{line}: record {number}", member


def _is_lines(text: str) -> bool:
    """Return whether a file has an object on each line, as `--append-result` writes them."""
    first = text.lstrip().partition("\n")[0].strip()
    return first.startswith("{") and first.endswith("}")


# Lengths of texts, in tokens.


class _Lengths:
    """A counter of the tokens of texts, as `--tokenizer` says."""

    def __init__(self, path: Path, tokenizer: str) -> None:
        """Raises `ConfigError` if nothing says how."""
        if not tokenizer:
            raise ConfigError(
                f"{path} has texts and no lengths: give --tokenizer MODEL, whose tokens are "
                "counted, or --tokenizer 4 for a token every four characters"
            )
        self._characters = float(tokenizer) if _is_number(tokenizer) else 0.0
        if _is_number(tokenizer) and not 0 < self._characters < LATEST:
            raise ConfigError(
                f"--tokenizer: expected characters per token above 0, got {tokenizer}"
            )
        self._name = tokenizer

    def of(self, texts: Sequence[str]) -> list[int]:
        """Return the length of each text; 0 for an empty one."""
        if self._characters:
            return [math.ceil(len(text) / self._characters) for text in texts]
        found = _tokenizer(self._name)(list(texts), verbose=False)["input_ids"] if texts else []
        return [len(ids) if text else 0 for text, ids in zip(texts, found, strict=True)]


@cache
def _tokenizer(model: str) -> Any:
    from aioserve.config import ModelConfig
    from aioserve.model_source.info import ModelInfo

    return ModelInfo(ModelConfig(model=model)).tokenizer


def _check_time(where: str, name: str, seconds: float) -> None:
    if not 0 <= seconds <= LATEST:
        raise ConfigError(f"{where}: {name}: expected seconds of 0 to {LATEST:g}, got {seconds:g}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ShareGPT: chats with their words.


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Chat(msgspec.Struct):
    """A record of ShareGPT; other keys, such as `id`, are skipped."""

    conversations: list[_Turn]


ASSISTANTS = {"gpt", "chatgpt", "assistant", "bing", "bard", "model"}


def read_sharegpt(records: _Records, seed: int, reading: Reading) -> Traffic:
    """Return the chats of a file: the first question and its answer, as vLLM's benchmark sends
    them, or, with `reading.think`, all turns, each that many seconds after the answer before it.
    """
    found: list[WorkloadRequest] = []
    for number, chat in enumerate(_chats(records, reading)):
        said: list[Piece] = []
        for turn, (asked, answered) in enumerate(chat):
            said.append(Piece(text_name("sharegpt", seed, number, turn), asked))
            place = len(found)
            found.append(
                WorkloadRequest(
                    0.0 if turn == 0 else reading.think or 0.0,
                    tuple(said),
                    answered,
                    follows=-1 if turn == 0 else place - 1,
                    session=number,
                )
            )
            said.append(Piece(text_name("sharegpt", seed, number, turn, "reply"), answered, place))
            if reading.think is None:
                break
    return Traffic(found, has_arrivals=False)


def _chats(records: _Records, reading: Reading) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the tokens asked and answered in each turn of each chat, counted once for all
    seeds.
    """
    stamp = records.path.stat()
    key = (str(records.path), stamp.st_mtime_ns, stamp.st_size, reading.tokenizer)
    if key not in _COUNTED:
        _COUNTED.clear()
        _COUNTED[key] = tuple(_count_chats(records, _Lengths(records.path, reading.tokenizer)))
    return _COUNTED[key]


_COUNTED: dict[Any, tuple[tuple[tuple[int, int], ...], ...]] = {}


def _count_chats(records: _Records, lengths: _Lengths) -> Iterator[tuple[tuple[int, int], ...]]:
    for _, chat in records.decoded(_Chat):
        numbers = lengths.of([turn.value for turn in chat.conversations])
        turns, asked = [], 0
        for turn, number in zip(chat.conversations, numbers, strict=True):
            # What an assistant says before anybody has asked is a part of the prompt.
            if turn.speaker.lower() in ASSISTANTS and asked and number:
                turns.append((asked, number))
                asked = 0
            else:
                asked += number
        if turns:
            yield tuple(turns)


# vLLM: results of its benchmark, and the prompts that one can give it.


class _BenchmarkResult(msgspec.Struct):
    """The keys of a result of `vllm bench serve --save-result --save-detailed` that are read."""

    input_lens: list[int] | None = None
    output_lens: list[int] | None = None
    start_times: list[float] | None = None  # seconds of the client's clock; since vLLM 0.11
    errors: list[str | None] | None = None


def read_benchmark_result(records: _Records, seed: int, reading: Reading) -> Traffic:
    """Return the requests of one run of vLLM's benchmark; those that failed are left out."""
    results = list(records.decoded(_BenchmarkResult))
    where, result = results[0]
    if len(results) > 1:
        raise ConfigError(
            f"{results[1][0]}: a second result; a workload is one run: keep one line of the file"
        )
    if result.input_lens is None or result.output_lens is None:
        raise ConfigError(
            f"{where}: expected the lengths of each request (input_lens and output_lens), got "
            "totals alone: run the benchmark with --save-detailed"
        )
    columns = {
        "input_lens": result.input_lens,
        "output_lens": result.output_lens,
        "start_times": result.start_times,
        "errors": result.errors,
    }
    stated = {name: len(values) for name, values in columns.items() if values is not None}
    if len(set(stated.values())) > 1:
        said = ", ".join(f"{name} has {number}" for name, number in stated.items())
        raise ConfigError(f"{where}: expected lists of one length, got other numbers: {said}")
    found = []
    for i, (prompt, output) in enumerate(zip(result.input_lens, result.output_lens, strict=True)):
        if output < 1 or (result.errors is not None and result.errors[i]):
            continue
        if prompt < 1:
            raise ConfigError(f"{where}: input_lens[{i}]: expected at least 1, got {prompt}")
        arrival = 0.0 if result.start_times is None else result.start_times[i]
        _check_time(where, f"start_times[{i}]", arrival)
        text = Piece(text_name("benchmark", seed, i), prompt)
        found.append(WorkloadRequest(arrival, (text,), output))
    return Traffic(found, has_arrivals=result.start_times is not None)


class _Prompt(msgspec.Struct):
    """A line of vLLM's custom dataset."""

    prompt: str
    output_tokens: Annotated[int, Meta(ge=1)]


def read_prompts(records: _Records, seed: int, reading: Reading) -> Traffic:
    """Return the prompts of a custom dataset of vLLM's benchmark, each a text of its own."""
    rows = list(records.decoded(_Prompt))
    numbers = _Lengths(records.path, reading.tokenizer).of([row.prompt for _, row in rows])
    found = []
    for number, ((where, row), length) in enumerate(zip(rows, numbers, strict=True)):
        if not length:
            raise ConfigError(f"{where}: expected a prompt of at least one token, got an empty one")
        text = Piece(text_name("prompts", seed, number), length)
        found.append(WorkloadRequest(0.0, (text,), row.output_tokens))
    return Traffic(found, has_arrivals=False)


# Logs of APIs: what was answered, with the tokens that it was billed for.


class _Usage(msgspec.Struct):
    """The usage of an answer, by the names of OpenAI's two APIs and of Anthropic's."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None  # Anthropic's input_tokens are those beside these
    cache_creation_input_tokens: int | None = None

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of the prompt, found in a cache or not; None if they are not stated."""
        if self.prompt_tokens is not None or self.input_tokens is None:
            return self.prompt_tokens
        cached = (self.cache_read_input_tokens, self.cache_creation_input_tokens)
        return self.input_tokens + sum(number or 0 for number in cached)

    @property
    def num_output_tokens(self) -> int | None:
        """Tokens of the reply; None if they are not stated, as for an embedding."""
        return self.output_tokens if self.completion_tokens is None else self.completion_tokens


class _Answer(msgspec.Struct):
    """An answer of `/v1/chat/completions`, `/v1/completions`, `/v1/responses` or `/v1/messages`."""

    usage: _Usage | None = None
    created: float | None = None  # seconds since 1970
    created_at: float | None = None  # so the Responses API calls them
    model: str = ""
    user: str | None = None
    error: Any = None


class _BatchResponse(msgspec.Struct):
    body: _Answer | None = None


class _Logged(_Answer):
    """A line of a log: an answer, or one that a file of a batch has around it."""

    response: _BatchResponse | None = None


def read_usages(records: _Records, seed: int, reading: Reading) -> Traffic:
    """Return a request for each answer; the model is its class. Errors are left out."""
    found: list[WorkloadRequest] = []
    has_arrivals: bool | None = None
    for number, (where, line) in enumerate(records.decoded(_Logged)):
        answer = line if line.response is None else line.response.body
        if answer is None or answer.error is not None or line.error is not None:
            continue
        if answer.usage is None or answer.usage.num_prompt_tokens is None:
            raise ConfigError(
                f"{where}: expected a usage with prompt_tokens or input_tokens, got an answer "
                "without them"
            )
        output = answer.usage.num_output_tokens
        prompt = answer.usage.num_prompt_tokens
        if prompt < 1 or (output is not None and output < 0):
            raise ConfigError(
                f"{where}: expected at least 1 token in and 0 out, got {prompt} and {output}"
            )
        created = answer.created if answer.created is not None else answer.created_at
        if has_arrivals not in (None, created is not None):
            raise ConfigError(f"{where}: created is stated for some answers and not for others")
        has_arrivals = created is not None
        _check_time(where, "created", created or 0.0)
        found.append(
            WorkloadRequest(
                created or 0.0,
                (Piece(text_name("usages", seed, number), prompt),),
                max(output or 0, 1),  # an embedding costs as much as with one token
                kind=answer.model,
                user=answer.user or "",
            )
        )
    return Traffic(found, bool(has_arrivals))


# Tables of one's own: CSV with a header, or records of JSON, whose columns `--columns` names.


Row = Mapping[str, Any]


def read_table(path: Path, text: str, seed: int, reading: Reading) -> Traffic:
    """Return a request for each row; rows whose reply has no token have failed and are left out."""
    columns = dict(reading.columns)
    rows = [
        (where, {field: _cell(row, column) for field, column in columns.items()}, row)
        for where, row in (_csv_rows if path.suffix == ".csv" else _json_rows)(path, text)
    ]
    for where, cells, row in rows[:1]:
        for field in (field for field, value in cells.items() if value is None):
            raise ConfigError(
                f"{where}: expected the column {columns[field]!r}, as --columns says of {field}, "
                f"got {', '.join(map(repr, row))}"
            )
    counted = {
        field: _Lengths(path, reading.tokenizer).of(
            [str(cells[field] or "") for _, cells, _ in rows]
        )
        for field in ("prompt_text", "output_text")
        if field in columns
    }
    sessions: dict[str, int] = {}
    found = []
    for number, (where, cells, _) in enumerate(rows):
        read = _Cells(where, columns, cells | {name: of[number] for name, of in counted.items()})
        if not (output := read.count("output_text" if "output_text" in columns else "output")):
            continue
        prompt = read.count("prompt_text" if "prompt_text" in columns else "prompt", least=1)
        session = read.text("session")
        found.append(
            WorkloadRequest(
                read.arrival(),
                (Piece(text_name("table", seed, number), prompt),),
                output,
                priority=read.number("priority", int),
                user=read.text("user"),
                timeout=read.seconds("timeout"),
                kind=read.text("class"),
                session=sessions.setdefault(session, len(sessions)) if session else -1,
                max_tokens=read.count("max_tokens") or None,
            )
        )
    return Traffic(found, bool({"arrival", "arrival_ms"} & {*columns}))


class _Cells:
    """The cells of one row, by what they mean; errors name the column and what it holds."""

    def __init__(self, where: str, columns: Mapping[str, str], cells: Row) -> None:
        self._where, self._columns, self._cells = where, columns, cells

    def text(self, field: str) -> str:
        """Return a cell as text; empty if there is no such column."""
        value = self._cells.get(field)
        return "" if value is None else str(value)

    def count(self, field: str, least: int = 0) -> int:
        """Return a number of tokens; 0 if there is none."""
        if (value := self.number(field, int)) < least:
            raise self._wrong(field, f"a whole number of at least {least}")
        return value

    def number(self, field: str, kind: type[T]) -> T:
        """Return a number as `kind`, int or float; 0 if there is none."""
        value = self._cells.get(field)
        if value is None or value == "":
            return kind(0)
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not abs(found) <= LARGEST or (kind is int and found != int(found)):
            raise self._wrong(field, "a whole number" if kind is int else "a number")
        return kind(found)

    def seconds(self, field: str) -> float | None:
        """Return a time above 0; None if there is none, or 0."""
        if (found := self.number(field, float)) < 0:
            raise self._wrong(field, "seconds, at least 0")
        return found or None

    def arrival(self) -> float:
        """Return the seconds of an arrival, since 1970 or since any other moment."""
        if "arrival_ms" in self._columns:
            if self._cells.get("arrival_ms") in (None, ""):
                raise self._wrong("arrival_ms", "milliseconds")
            return self.number("arrival_ms", float) / 1e3
        value = self._cells.get("arrival")
        if "arrival" not in self._columns or _is_number(str(value)):
            return self.number("arrival", float)
        try:
            return datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError, OSError):
            raise self._wrong("arrival", "seconds, or a date such as 2026-01-31T12:00:00") from None

    def _wrong(self, field: str, expected: str) -> ConfigError:
        value = self._cells.get(field)
        return ConfigError(
            f"{self._where}: {self._columns[field]}: expected {expected}, got {value!r}"
        )


def _cell(row: Row, column: str) -> Any:
    """Return what a row has in a column; in records of JSON, `usage.prompt_tokens` reaches inside.
    None if it has none.
    """
    if column in row:
        return row[column]
    name, dot, rest = column.partition(".")
    inner = row.get(name)
    return _cell(inner, rest) if dot and isinstance(inner, dict) else None


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a CSV file by its header; semicolons and tabs separate columns too."""
    lines = text.splitlines(keepends=True)
    header = lines[0] if lines else ""
    rows = csv.reader(lines, delimiter=max(",;\t", key=header.count))
    names: list[str] = []
    try:
        for cells in rows:
            where = f"{path}:{rows.line_num}"
            if not names:
                names = [name.strip() for name in cells]
            elif len(cells) != len(names) and cells:
                raise ConfigError(f"{where}: expected {len(names)} columns, got {len(cells)}")
            elif cells:
                yield where, dict(zip(names, map(str.strip, cells), strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.line_num}: {error}") from error


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    yield from _Records(path, text).decoded(dict[str, Any])
