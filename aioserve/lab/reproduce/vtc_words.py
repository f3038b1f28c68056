"""Predictions beside what was measured: as plain data, as tables for a terminal, as a picture.

Knows runs and targets. A measured value that is not published is None, and a dash in tables.
"""

from collections.abc import Callable
from html import escape
from math import ceil, floor, log10
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.lab.reproduce.vtc import MIN_REQUESTS, Prediction, Run

Value = Callable[[Run], float]
Places = npt.NDArray[np.bool_]  # which requests are a client's


class Row(msgspec.Struct, frozen=True):
    """One quantity of one workload: the mean over the runs, beside the measured value. The range is
    that of the runs and of those with the quickest and the slowest host of all sessions.
    """

    name: str
    measured: float | None
    predicted: float
    least: float
    most: float

    @property
    def error(self) -> float | None:
        """The predicted value minus the measured one, as a share of that; None without one."""
        return self.predicted / self.measured - 1 if self.measured else None


class Table(msgspec.Struct, frozen=True):
    """The measured and the predicted numbers of one workload under one policy."""

    workload: str
    policy: str
    window: float  # seconds
    requests: int
    session_of: str  # the file whose host speed the runs have
    host_factor: float
    rows: list[Row]


def tabulate(prediction: Prediction) -> Table:
    """Return all rows of one workload: totals, then each client with enough requests."""
    target = prediction.target
    measured = None if target.measured is None else Run.of(target.measured)
    fcfs = None if target.measured_fcfs is None else Run.of(target.measured_fcfs)
    rows: list[Row] = []

    def add(name: str, value: Value) -> None:
        values = [value(run) for run in prediction.vtc]
        ends = [*values, *(value(run) for run, _ in prediction.sessions)]
        is_there = None if measured is None else value(measured)
        rows.append(Row(name, is_there, float(np.mean(values)), min(ends), max(ends)))

    window = target.window
    add("end of run, s", lambda run: float(run.end.max()))
    add(f"finished by {window:.0f} s", lambda run: float(run.finished(window)))
    add(f"requests/s until {window:.0f} s", lambda run: run.finished(window) / window)
    add("TTFT mean, s", lambda run: float(run.ttft.mean()))
    add("TTFT p50, s", lambda run: float(np.median(run.ttft)))
    clients = np.array([outcome.client for outcome in target.arrivals])
    for client in sorted(set(clients), key=lambda name: (len(name), name)):
        own = clients == client
        if own.sum() < min(MIN_REQUESTS, len(own) / 4):
            continue
        label = f"client {client} ({own.sum()} requests)"
        add(f"{label}: finished", _finished(own, window))
        add(f"{label}: TTFT mean, s", _mean_ttft(own))
        add(f"{label}: TTFT p50, s", _median_ttft(own))
        pairs = [*zip(prediction.vtc, prediction.fcfs, strict=True), *prediction.sessions]
        ends = [float(a.ttft[own].mean() / b.ttft[own].mean()) for a, b in pairs]
        ratios = ends[: len(prediction.vtc)]
        known = None
        if measured is not None and fcfs is not None:
            known = float(measured.ttft[own].mean() / fcfs.ttft[own].mean())
        name = f"{label}: TTFT mean, VTC/FCFS"
        rows.append(Row(name, known, float(np.mean(ratios)), min(ends), max(ends)))
    return Table(
        target.name,
        "weighted VTC" if target.weights else "VTC",
        window,
        len(target.arrivals),
        target.session_of,
        target.session.host_factor,
        rows,
    )


def _finished(own: Places, window: float) -> Value:
    return lambda run: float((run.end[own] <= window).sum())


def _mean_ttft(own: Places) -> Value:
    return lambda run: float(run.ttft[own].mean())


def _median_ttft(own: Places) -> Value:
    return lambda run: float(np.median(run.ttft[own]))


def render(table: Table) -> str:
    """Return the table for a terminal."""
    width = max(len(row.name) for row in table.rows)
    lines = [
        f"{table.workload}: {table.requests} requests under {table.policy}, host as in "
        f"{table.session_of} (factor {table.host_factor:.3f})",
        f"{'':{width}}  {'measured':>9}  {'predicted':>9}  {'runs and sessions':>18}  {'error':>7}",
    ]
    for row in table.rows:
        measured = "-" if row.measured is None else _number(row.measured)
        spread = f"{_number(row.least)} .. {_number(row.most)}"
        error = "" if row.error is None else f"{100 * row.error:+.1f}%"
        lines.append(
            f"{row.name:{width}}  {measured:>9}  {_number(row.predicted):>9}  {spread:>18}  "
            f"{error:>7}".rstrip()
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:#.4g}".rstrip(".")


def summary(tables: list[Table]) -> str:
    """Return how far the predictions lie from what is published of them, in a few lines."""
    kinds = {
        "end of run": "end of run",
        "finished": "finished by",
        "TTFT mean of clients": "TTFT mean, s",
        "ratio to FCFS of clients": "VTC/FCFS",
    }
    lines = []
    for title, mark in kinds.items():
        errors = [
            abs(row.error)
            for table in tables
            for row in table.rows
            if mark in row.name and row.error is not None and _is_of(title, row)
        ]
        if errors:
            lines.append(
                f"{title}: {len(errors)} published, mean absolute error "
                f"{100 * float(np.mean(errors)):.2f}%, largest {100 * max(errors):.2f}%"
            )
    return "\n".join(lines) or "Nothing of what is predicted is published in this folder."


def _is_of(title: str, row: Row) -> bool:
    return row.name.startswith("client") == title.endswith("clients")


def as_document(tables: list[Table]) -> list[dict[str, Any]]:
    """Return the tables as plain data, errors included."""
    return [
        {
            **msgspec.to_builtins(table),
            "rows": [{**msgspec.to_builtins(row), "error": row.error} for row in table.rows],
        }
        for table in tables
    ]


# A picture of measured and predicted times to first token, client by client, as SVG. Knows rows.
# Needs nothing but a browser.


WIDTH, LEFT, RIGHT, ROW = 900, 330, 40, 22
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}"
    ".grid{stroke:#ddd}.range{stroke:#4078c0;stroke-width:6;stroke-linecap:round;opacity:.35}"
    ".predicted{fill:#4078c0}.measured{fill:none;stroke:#c0392b;stroke-width:2}"
)


Scale = Callable[[float], float]  # from seconds to a place on the axis


def draw(tables: list[Table]) -> str:
    """Return one line for each client of each workload, on a logarithmic axis of seconds."""
    lines = [
        (table, row) for table in tables for row in table.rows if row.name.endswith("TTFT mean, s")
    ]
    values = [v for _, row in lines for v in (row.least, row.most, row.measured) if v]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))

    def x(value: float) -> float:
        return LEFT + (log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    height = 70 + ROW * (len(lines) + len(tables))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="10" y="20">Mean time to first token under VTC, seconds</text>',
        f'<circle class="measured" cx="{LEFT + 300}" cy="16" r="5"/>'
        f'<text class="small" x="{LEFT + 310}" y="20">measured</text>'
        f'<circle class="predicted" cx="{LEFT + 380}" cy="16" r="3.5"/>'
        f'<text class="small" x="{LEFT + 390}" y="20">predicted; range over sessions</text>',
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="34" y2="{height - 28}"/>'
            f'<text class="small" x="{at:.1f}" y="{height - 12}" text-anchor="middle">'
            f"{10.0**power:g}</text>"
        )
    y = 34.0
    shown: Table | None = None
    for table, row in lines:
        if table is not shown:
            shown, y = table, y + ROW
            parts.append(
                f'<text x="10" y="{y:.0f}">{escape(table.workload)} '
                f'<tspan class="small">{table.policy}</tspan></text>'
            )
        y += ROW
        parts.append(_line(row, x, y))
    return "\n".join([*parts, "</svg>", ""])


def _line(row: Row, x: Scale, y: float) -> str:
    name = escape(row.name.removesuffix(": TTFT mean, s").replace("TTFT mean, s", "all requests"))
    middle = y - 4
    marks = [
        f'<text class="small" x="{LEFT - 12}" y="{y:.0f}" text-anchor="end">{name}</text>',
        f'<line class="range" x1="{x(row.least):.1f}" x2="{x(row.most):.1f}" y1="{middle:.1f}" '
        f'y2="{middle:.1f}"/>',
        f'<circle class="predicted" cx="{x(row.predicted):.1f}" cy="{middle:.1f}" r="3.5"/>',
    ]
    if row.measured:
        marks.append(
            f'<circle class="measured" cx="{x(row.measured):.1f}" cy="{middle:.1f}" r="6"/>'
        )
    return "".join(marks)
