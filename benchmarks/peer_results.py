"""What `peers.py` has measured of servers: kept after each, and made into tables.

Results are on the disk in a file, and read again by a run that goes on. A cell of a table is the
median of the rounds with the least and the most of them; `*` says that other processes used the
machine meanwhile. What is written into README.md and docs/ stands between two comments of the page,
with the processor, the date and the command; the medians of each run that was written are a line of
`history.jsonl`, from which the table of all runs is made. Measures nothing.
"""

import datetime
import math
import os
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from build_peers import BFLOAT16, FILES, Peer
from harness import ROOT, Use

from aioserve.support import __version__

COLUMNS = ("tokens/s", "TTFT p50 ms", "TTFT p99 ms", "gap p50 ms", "gap p99 ms")
RATE, FIRST, LATE, GAP, _ = COLUMNS
TITLES = {
    RATE: "Output tokens per second:",
    FIRST: "Median TTFT in milliseconds:",
    LATE: "99th percentile of TTFT in milliseconds:",
    GAP: "Median gap between two tokens of a stream in milliseconds:",
}
HEADS = {
    "W1": "1 stream",
    "W2": "16 streams",
    "W3": "4 long prompts",
    "W4": "8 that share a prefix",
    "W5": "64 streams",
}
README_LOADS = ("W1", "W2", "W3", "W5")
COSTS = {
    "start_seconds": "start, s",
    "resident_at_start": "resident at the start, MiB",
    "resident_at_end": "after the loads, MiB",
}
HISTORY = Path(__file__).with_name("history.jsonl")
OURS = "aioserve"
FENCE = "```bash\nmake bench-peers ARGS=--write\n```"


class Settings(msgspec.Struct, frozen=True):
    """What must be equal for two results to be of one run."""

    cpu: str
    threads: int
    revision: str
    requests_per_stream: dict[str, int]


class Cell(msgspec.Struct, frozen=True):
    """One load on one server in one round; `values` by the labels of the columns of `peers.py`."""

    values: dict[str, float | None]
    others: float  # cores that other processes used meanwhile
    steal: float  # cores that the host took meanwhile
    errors: list[str]
    notes: list[str]

    @classmethod
    def failed(cls, words: str) -> "Cell":
        """Nothing was measured, for the reason given."""
        return cls({}, 0.0, 0.0, [words], [])

    @property
    def is_quiet(self) -> bool:
        """Others have left the machine alone."""
        return Use(self.others, self.steal).is_quiet


class Visit(msgspec.Struct, frozen=True):
    """A server in a round: seconds until it answered, resident MiB, and its loads."""

    round: int
    server: str
    start_seconds: float
    resident_at_start: float
    resident_at_end: float
    cells: dict[str, Cell]
    finished: str = ""  # day and time


class Range(NamedTuple):
    """Median, least and most of the rounds."""

    median: float
    least: float
    most: float
    is_quiet: bool


class Run(msgspec.Struct, frozen=True):
    """Medians of one run of `peers.py`: a line of `history.jsonl`."""

    version: str  # of aioserve
    revision: str
    date: str  # the last day on which something was measured
    cpu: str
    threads: int
    rounds: int
    # Output tokens per second, by weights, label of the server, load.
    rates: dict[str, dict[str, dict[str, float]]]

    def ratio(self, weights: str, load: str) -> float | None:
        """Rate of aioserve, with the faster activations, to that of the best peer."""
        servers = self.rates.get(weights, {})
        found = {label: rates[load] for label, rates in servers.items() if load in rates}
        ours = [rate for label, rate in found.items() if label.startswith(OURS)]
        peers = [rate for label, rate in found.items() if not label.startswith(OURS)]
        return max(ours) / max(peers) if ours and peers else None


class _File(msgspec.Struct):
    settings: Settings
    visits: list[Visit] = []


class Results:
    """All visits so far. Each one that is added is on the disk when `add` returns."""

    def __init__(self, path: Path, found: _File) -> None:
        self._path, self._found = path, found

    @property
    def settings(self) -> Settings:
        """The settings that this run measures with."""
        return self._found.settings

    @property
    def dates(self) -> list[str]:
        """The days on which something was measured."""
        return sorted({visit.finished[:10] for visit in self._found.visits})

    @property
    def num_rounds(self) -> int:
        """Rounds of which something is there."""
        return len({visit.round for visit in self._found.visits})

    def add(self, visit: Visit) -> None:
        """Keep it, with the time."""
        now = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
        self._found.visits.append(msgspec.structs.replace(visit, finished=now))
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self._found)))
        os.replace(part, self._path)

    def has(self, round_: int, server: str, load: str) -> bool:
        """Whether the load was sent to the server in that round, and was answered."""
        return any(
            visit.round == round_ and visit.server == server and bool(cell.values)
            for visit in self._found.visits
            for name, cell in visit.cells.items()
            if name == load
        )

    def cells(self, server: str, load: str) -> list[Cell]:
        """All results that were measured with these settings."""
        found = [visit.cells.get(load) for visit in self._found.visits if visit.server == server]
        return [cell for cell in found if cell is not None and cell.values]

    def range(self, server: str, load: str, label: str) -> Range | None:
        """A column over the rounds, or None where nothing was measured."""
        cells = self.cells(server, load)
        values = [value for cell in cells if (value := cell.values.get(label)) is not None]
        return _range(values, all(cell.is_quiet for cell in cells))

    def range_of_visits(self, server: str, field: str) -> Range | None:
        """A number of the visits over the rounds."""
        visits = [v for v in self._found.visits if v.server == server and v.start_seconds]
        return _range([getattr(visit, field) for visit in visits], is_quiet=True)

    def quiet_cells(self) -> tuple[int, int]:
        """How many loads ran while others left the machine alone, and how many there are."""
        cells = [c for visit in self._found.visits for c in visit.cells.values() if c.values]
        return sum(cell.is_quiet for cell in cells), len(cells)

    def errors(self, server: str, load: str) -> list[str]:
        """What failed, of all rounds."""
        visits = [visit for visit in self._found.visits if visit.server == server]
        return [word for visit in visits for c in [visit.cells.get(load)] if c for word in c.errors]


def _range(values: list[float], is_quiet: bool) -> Range | None:
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return None
    return Range(statistics.median(values), min(values), max(values), is_quiet)


def begin(folder: Path, settings: Settings, fresh: bool) -> Results:
    """Read the results that earlier runs kept with the same settings; those of other settings are
    put aside.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    if path.exists():
        found = msgspec.json.decode(path.read_bytes(), type=_File)
        if found.settings == settings and not fresh:
            return Results(path, found)
        aside = folder / f"results-until-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
        os.replace(path, aside)
        print(f"what was kept is of other settings, and now in {aside}", file=sys.stderr)
    return Results(path, _File(settings))


# Tables.


Column = Callable[[str], Range | None]  # by the key of a server


def show(results: Results, asked: Sequence[Peer]) -> None:
    """Print everything that was measured, and what failed."""
    print("\n\n".join([_sentences(results), *_full_tables(results, asked)]))
    for server in asked:
        for load in HEADS:
            for error in results.errors(server.key, load):
                print(f"{server.key}, {load}: {error}")


def write(results: Results, asked: Sequence[Peer]) -> None:
    """Put the tables into the pages."""
    words = _sentences(results)
    plain = [server for server in asked if server.weights == BFLOAT16]
    short = _table(plain, _loads(results, README_LOADS, RATE))
    _insert(ROOT / "README.md", [words, FENCE, TITLES[RATE], short])
    page = ROOT / "docs" / "benchmarks.md"
    _insert(page, [words, FENCE, *_full_tables(results, asked)])
    _insert(page, [history_table(remember(_as_run(results, asked)))], "bench-history")


# All runs that were written.


def _as_run(results: Results, asked: Sequence[Peer]) -> Run:
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for server in asked:
        found = {load: results.range(server.key, load, RATE) for load in HEADS}
        medians = {load: round(r.median, 1) for load, r in found.items() if r is not None}
        if medians:
            rates.setdefault(server.weights, {})[server.label] = medians
    settings = results.settings
    return Run(
        version=__version__,
        revision=settings.revision,
        date=results.dates[-1],
        cpu=settings.cpu,
        threads=settings.threads,
        rounds=results.num_rounds,
        rates=rates,
    )


def remember(run: Run, path: Path = HISTORY) -> list[Run]:
    """Add a run to the file, in the place of one of the same revision and processor. Returns all,
    the oldest first.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    runs = [msgspec.json.decode(line, type=Run) for line in lines]
    runs = [r for r in runs if (r.revision, r.cpu) != (run.revision, run.cpu)] + [run]
    runs.sort(key=lambda r: r.date)
    path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in runs))
    return runs


def history_table(runs: Sequence[Run]) -> str:
    """Return the ratios to the best peer of all runs: those alone are comparable between days."""
    rows = [
        f"| version | date | processor | weights | {' | '.join(HEADS)} |",
        "|---" * (4 + len(HEADS)) + "|",
    ]
    for run in reversed(runs):
        for weights in FILES:
            ratios = [run.ratio(weights, load) for load in HEADS]
            if any(ratios):
                cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
                name = f"{run.version} ({run.revision})"
                rows.append(f"| {' | '.join([name, run.date, run.cpu, weights, *cells])} |")
    return "\n".join(rows)


def _full_tables(results: Results, asked: Sequence[Peer]) -> list[str]:
    found = []
    for label, title in TITLES.items():
        found += [title, _table(asked, _loads(results, HEADS, label))]
    costs = {head: partial(results.range_of_visits, field=field) for field, head in COSTS.items()}
    return [*found, "Start and resident memory:", _table(asked, costs)]


def _loads(results: Results, loads: Iterable[str], label: str) -> dict[str, Column]:
    """A column of `peers.py`, load by load."""
    return {
        f"{load}: {HEADS[load]}": partial(results.range, load=load, label=label) for load in loads
    }


def _table(asked: Sequence[Peer], columns: Mapping[str, Column]) -> str:
    """A row for each server that has a value, grouped by the weights that it serves."""
    rows = [f"| weights | server | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for weights in FILES:
        for server in asked:
            ranges = [column(server.key) for column in columns.values()]
            if server.weights == weights and any(ranges):
                name = weights if weights == BFLOAT16 else f"GGUF {weights}"
                rows.append(f"| {name} | {server.label} | {' | '.join(map(_cell, ranges))} |")
    return "\n".join(rows)


def _cell(found: Range | None) -> str:
    if found is None:
        return ""
    digits = 1 if found.median < 50 else 0
    median, least, most = (f"{value:,.{digits}f}" for value in found[:3])
    return f"{median} ({least} to {most})" + ("" if found.is_quiet else " *")


def _sentences(results: Results) -> str:
    """On what and when it was measured, and how quiet it was."""
    settings = results.settings
    quiet, cells = results.quiet_cells()
    text = (
        f"SmolLM2-135M on {settings.threads} cores of an {settings.cpu}, "
        f"{' and '.join(results.dates)}, revision {settings.revision}: the median of "
        f"{results.num_rounds} rounds, with the least and the most of them in brackets. "
    )
    if quiet == cells:
        text += f"Nothing else used the machine during the {cells} runs."
    else:
        text += f"Other processes used the machine during {cells - quiet} of {cells} runs (`*`)."
    return textwrap.fill(text, 100)


def _insert(page: Path, parts: Sequence[str], name: str = "bench-peers") -> None:
    """Put the parts between the page's two comments of that name."""
    old, text = page.read_text(encoding="utf-8"), "\n\n".join(parts)
    pattern = rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- /{name} -->)"
    new, count = re.subn(pattern, lambda _: text, old, flags=re.DOTALL)
    assert count == 1, f"{page} has {count} places for the tables"
    page.write_text(new, encoding="utf-8")
    print(f"written: {page}")
