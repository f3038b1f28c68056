"""How clients and classes of clients fared: rows for the report, and a table for a terminal.

Knows the document that `compare` makes; which groups get a line is said there.
"""

import math
from typing import Any, NamedTuple

from aioserve.lab.comparison.document import Document
from aioserve.lab.comparison.rows import Row, verdict

COLUMNS = [
    Row(f"{label} {statistic}", measure, statistic, "ms", 1e3, 1, -1)
    for label, measure, statistic in (
        ("TTFT", "ttft", "p50"),
        ("TTFT", "ttft", "p99"),
        ("TPOT", "tpot", "p99"),
        ("e2e", "e2e", "p50"),
        ("e2e", "e2e", "p99"),
    )
]
GOOD = Row("SLO, %", "is_good", "mean", "points", 100, 1, 1)
SURE = "*"
COMPETING = (
    "competing: of the time, steps left out a waiting request of this client and one of another; "
    "share: of the tokens that such clients were served then; due: by weight; behind: "
    "the most service by which it fell behind another one then"
)


class Cell(NamedTuple):
    """A value in its column's unit (NaN: unknown), and how it differs from the first one's."""

    value: float
    difference: dict[str, Any] | None
    verdict: str


class GroupRow(NamedTuple):
    """One group under one configuration."""

    name: str
    config: str
    requests: int
    unfinished: int
    cells: list[Cell]  # of `columns`
    competing: float | None  # share of the time; clients only
    share: float | None  # of what was served while clients competed
    due_share: float | None
    behind: float | None  # service


def columns(document: Document) -> list[Row]:
    """The columns of tables of groups: latencies, and the share within the SLO if there is one."""
    return COLUMNS if document["slo"] is None else [*COLUMNS, GOOD]


class GroupTable(NamedTuple):
    """The groups of one kind, "client" or "class"."""

    kind: str
    rows: list[GroupRow]
    num_more: int  # groups without a row


def group_tables(document: Document) -> list[GroupTable]:
    """Nothing where there is one client and one class."""
    return [
        GroupTable(
            kind,
            [
                _row(document, result, kind, name)
                for name in names
                for result in document["results"]
            ],
            len(document["results"][0]["groups"][kind]) - len(names),
        )
        for kind, names in document["listed_groups"].items()
    ]


def _row(document: Document, result: dict[str, Any], kind: str, name: str) -> GroupRow:
    group = result["groups"][kind][name]
    first = document["results"][0]["groups"][kind][name]
    differences = result.get("against_first", {}).get("groups", {}).get(kind, {}).get(name, {})
    cells = []
    for column in columns(document):
        value, base = (_value(g, column) * column.factor for g in (group, first))
        difference = differences.get(column.measure, {}).get(column.statistic)
        if math.isnan(value) or math.isnan(base):
            difference = None
        cells.append(Cell(value, difference, verdict(difference, column, base)))
    service, seconds = group.get("service", {}), result["totals_by_seed"]["seconds"]
    return GroupRow(
        name or "(no name)",
        result["name"],
        group["requests"],
        group["unfinished"],
        cells,
        None if not service else service["competing_seconds"] / max(sum(seconds), 1e-9),
        service.get("share"),
        service.get("due_share"),
        service.get("behind"),
    )


def _value(group: dict[str, Any], column: Row) -> float:
    if column is GOOD:
        return float(group.get("good_share", math.nan))
    return float(group["durations"][column.measure][column.statistic])


def render_groups(document: Document) -> list[str]:
    """Lines of fixed width, with an empty one before each table."""
    lines: list[str] = []
    for table in group_tables(document):
        lines += ["", *_table(table, columns(document))]
    if any(SURE in line for line in lines):
        first = document["results"][0]["name"]
        lines.append(
            f"{SURE} surely differs from {first}, by more than 1%: the 95% intervals hold for all "
            "groups of a kind together"
        )
    if any(" share, %" in line for line in lines):
        lines.append(COMPETING)
    return lines


def _table(table: GroupTable, columns: list[Row]) -> list[str]:
    has_shares = any(row.share is not None for row in table.rows)
    has_unfinished = any(row.unfinished for row in table.rows)
    heads = [f"by {table.kind}, ms", "", "requests", *(["unfinished"] if has_unfinished else [])]
    heads += [column.label for column in columns]
    heads += ["competing, %", "share, %", "due, %", "behind"] if has_shares else []
    lines = [heads]
    last = None
    for row in table.rows:
        words = ["" if row.name == last else row.name, row.config, str(row.requests)]
        words += [str(row.unfinished)] if has_unfinished else []
        words += [_shown(cell, column) for cell, column in zip(row.cells, columns, strict=True)]
        if has_shares:
            shares = (row.competing, row.share, row.due_share)
            words += ["-" if share is None else f"{100 * share:.1f}" for share in shares]
            words.append("-" if row.behind is None else f"{row.behind:.0f}")
        lines.append(words)
        last = row.name
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            f"{word:<{width}}" if i < 2 else f"{word:>{width}}"
            for i, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    if table.num_more:
        plural = "clients" if table.kind == "client" else "classes"
        shown.append(f"and {table.num_more} more {plural}, whose first tokens came sooner (--json)")
    return shown


def _shown(cell: Cell, column: Row) -> str:
    if math.isnan(cell.value):
        return "- "
    return f"{cell.value:.{column.digits}f}{SURE if cell.verdict in ('better', 'worse') else ' '}"
