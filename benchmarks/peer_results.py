"""What `bench_peers.py` has measured: kept in a file after each server, and read again.

Knows settings, visits and cells; knows neither servers nor tables.
"""

import datetime
import math
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
from quiet import Use


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
