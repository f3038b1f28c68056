"""A picture of measured and predicted times to first token, client by client, as SVG.

Knows rows. Needs nothing but a browser.
"""

from collections.abc import Callable
from html import escape
from math import ceil, floor, log10

from aioserve.lab.reproduce.words import Row, Table

WIDTH, LEFT, RIGHT, ROW = 900, 330, 40, 22
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#555}"
    ".grid{stroke:#ddd}.range{stroke:#4078c0;stroke-width:6;stroke-linecap:round;opacity:.35}"
    ".predicted{fill:#4078c0}.measured{fill:none;stroke:#c0392b;stroke-width:2}"
)


Scale = Callable[[float], float]  # from seconds to a place on the axis


def draw(tables: list[Table]) -> str:
    """One line for each client of each workload, on a logarithmic axis of seconds."""
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
        f'<text class="small" x="{LEFT + 390}" y="20">predicted, range over the runs</text>',
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
