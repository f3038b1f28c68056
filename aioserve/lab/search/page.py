"""What `search` has found, as one HTML file: a chart, the words of the terminal, and a table.

Knows findings as plain data and how charts are drawn. Measures nothing.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from aioserve.lab.comparison.knee import Bound, Knee, Need
from aioserve.lab.comparison.measures import Row, number
from aioserve.lab.comparison.report import static_page
from aioserve.lab.search.tuning import DEFAULT, Tuning

WIDTH, LEFT, RIGHT, ROW = 640, 190, 70, 26
MET, MISSED, CHOSEN = "#2b8a5f", "#c2553f", "#3f6fc2"
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24272b}.end{text-anchor:end}"
    ".limit{stroke:#5d636a;stroke-dasharray:5 4}.missed{fill-opacity:.35}"
    "@media (prefers-color-scheme: dark){text{fill:#e4e6e8}.limit{stroke:#a3a9b0}}"
)


class Bar(NamedTuple):
    """One bar of a bar chart, with its label and value."""

    label: str
    value: float
    text: str  # the value in words
    colour: str


def knee_page(knee: Knee, bounds: Sequence[Bound], words: str) -> str:
    """Return the page on the highest rate: each rate that was tried, and whether it keeps to the
    target.
    """
    probes = sorted(knee.probes, key=lambda probe: probe.rate)
    heads = ["requests/s", "time scale", "within the SLO", "worst class"]
    heads += [
        f"{bound.measure} {bound.statistic}, ms (at most {1e3 * bound.limit:g})" for bound in bounds
    ]
    cells, bars = [], []
    for probe in probes:
        shown = "" if probe.good_share is None else f"{100 * probe.good_share:.2f}%"
        worst = ""
        if probe.worst_class is not None:
            worst = f"{probe.worst_class} {100 * (probe.worst_class_share or 0):.2f}%"
        bounded = [f"{1e3 * value:.1f}" for value in probe.bounded.values()]
        cells.append([f"{probe.rate:.3f}", f"{probe.time_scale:.4f}", shown, worst, *bounded])
        colour = MET if probe.is_met else MISSED
        if probe.good_share is not None:
            bars.append(Bar(f"{probe.rate:.3g} requests/s", probe.good_share, shown, colour))
        else:
            over = max(v / b.limit for v, b in zip(probe.bounded.values(), bounds, strict=True))
            bars.append(Bar(f"{probe.rate:.3g} requests/s", over, f"{over:.2f}", colour))
    has_slo = any(probe.good_share is not None for probe in probes)
    what = "share of requests within the SLO" if has_slo else "largest bounded value over its bound"
    caption = f"Bars: {what} at each rate that was tried; green: the target is met."
    chart = _bars(bars, limit=knee.target if has_slo else 1.0)
    return _page("The highest rate", words, chart, caption, heads, cells)


def tuning_page(tuning: Tuning, row: Row, words: str) -> str:
    """Return the page on options: the score of each candidate in training, and of those that were
    evaluated on the held-out part.
    """
    held_out = {DEFAULT: tuning.held_out_default, tuning.chosen: tuning.held_out}
    bars, cells = [], []
    for name, value in zip(tuning.candidates, tuning.training, strict=True):
        colour = CHOSEN if name == tuning.chosen else MET
        bars.append(Bar(name, value, number(value, row), colour))
        if name in held_out:
            shown = number(held_out[name], row)
            bars.append(Bar("held out", held_out[name], shown, colour))
        cells.append(
            [name, number(value, row), number(held_out[name], row) if name in held_out else ""]
        )
    caption = f"Bars: {row.label}; blue: the candidate that was chosen."
    return _page(
        "Options that suit a workload",
        words,
        _bars(bars),
        caption,
        ["candidate", f"training: {row.label}", "held out"],
        cells,
    )


def needs_page(needs: Sequence[Need], most: int, words: str) -> str:
    """Return the page on replicas: how many each configuration needs, and what was tried."""
    bars, cells = [], []
    for need in needs:
        found = most if need.replicas is None else need.replicas
        text = f"over {most}" if need.replicas is None else str(need.replicas)
        bars.append(Bar(need.name, found, text, MISSED if need.replicas is None else MET))
        for attempt in sorted(need.attempts, key=lambda attempt: attempt.replicas):
            share = "" if attempt.good_share is None else f"{100 * attempt.good_share:.1f}%"
            bounded = ", ".join(f"{k} {1e3 * v:.1f} ms" for k, v in attempt.bounded.items())
            met = "yes" if attempt.is_met else "no"
            cells.append([need.name, str(attempt.replicas), share, bounded, met])
    caption = "Bars: the fewest replicas with which the workload keeps to its SLO."
    heads = ["configuration", "replicas", "within the SLO", "bounded", "enough"]
    return _page("The fewest replicas", words, _bars(bars), caption, heads, cells)


def _page(
    title: str,
    words: str,
    chart: str,
    caption: str,
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in cells
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f"<p>{escape(text)}</p>" for text in words.splitlines() if text.strip()]
    parts += [f'<div class="panel">{chart}</div>', f"<p>{escape(caption)}</p>"]
    parts.append(f'<div class="scroll">{table}</div>')
    return static_page(title, "\n".join(parts))


def _bars(bars: Sequence[Bar], limit: float | None = None) -> str:
    """Return an SVG of horizontal bars from 0, with a dashed line at `limit`."""
    most = max([bar.value for bar in bars] + ([] if limit is None else [limit]), default=1.0) or 1.0
    room, height = WIDTH - LEFT - RIGHT, ROW * len(bars) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="100%" role="img"><style>{_STYLE}</style>'
    ]
    for place, bar in enumerate(bars):
        y, width = 4 + ROW * place, max(bar.value, 0.0) / most * room
        parts.append(
            f'<text class="end" x="{LEFT - 8}" y="{y + 16}">{escape(bar.label)}</text>'
            f'<rect x="{LEFT}" y="{y + 4}" width="{width:.1f}" height="{ROW - 9}" rx="2" '
            f'fill="{bar.colour}"/>'
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 16}">{escape(bar.text)}</text>'
        )
    if limit is not None:
        x = LEFT + limit / most * room
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    return "".join([*parts, "</svg>"])
