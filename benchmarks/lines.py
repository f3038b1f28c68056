"""Panels of lines over time as one SVG file: what the docs show of long runs.

Knows axes, lines and marked spans; knows nothing about what is drawn.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, TOP, GAP = 860, 130, 62, 44, 46
COLOURS = ("#2563a8", "#c2541b", "#2f7d4f", "#7b4ba0", "#8a6d1f")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.t{font-weight:600}.h{font-size:15px;"
    "font-weight:600}.g{stroke:#e3e3e3}.a{stroke:#999}path{fill:none;stroke-width:1.4}"
)


class Panel(NamedTuple):
    """Lines that share an axis, which begins at 0."""

    title: str
    lines: Mapping[str, Points]


def draw(
    path: Path, title: str, panels: Sequence[Panel], spans: Mapping[str, tuple[float, float]]
) -> None:
    """Write them below each other, over the same seconds; `spans` are shaded and named."""
    end = max(x for panel in panels for line in panel.lines.values() for x, _ in line)
    per_second = (WIDTH - LEFT - 16) / max(end, 1e-9)
    height = TOP + len(panels) * (HEIGHT + GAP) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="h" x="{LEFT}" y="20">{escape(title)}</text>'
    ]
    for name, (since, until) in spans.items():
        x, width = LEFT + since * per_second, (until - since) * per_second
        below = height - TOP - GAP - 8
        out.append(
            f'<rect x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{below}" fill="#f7f0e3"/>'
        )
        out.append(f'<text x="{x + 4:.1f}" y="{TOP + 13}">{escape(name)}</text>')
    for number, panel in enumerate(panels):
        top = TOP + number * (HEIGHT + GAP)
        out += _panel(panel, top, end, per_second)
    out.append("</svg>\n")
    path.write_text("\n".join(out), encoding="utf-8")


def _panel(
    panel: Panel,
    top: float,
    end: float,
    per_second: float,
) -> list[str]:
    bottom = top + HEIGHT
    highest = max((y for line in panel.lines.values() for _, y in line), default=1.0)
    step = _step(highest / 3)
    ceiling = step * max(1, math.ceil(highest / step))
    out = []
    for tick in range(round(ceiling / step) + 1):
        y = bottom - HEIGHT * tick * step / ceiling
        out.append(
            f'<line class="g" x1="{LEFT}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick * step)}</text>'
        )
    seconds = _step(end / 8)
    for tick in range(int(end / seconds) + 1):
        x = LEFT + tick * seconds * per_second
        out.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">')
        out[-1] += f"{_number(tick * seconds)} s</text>"
    out.append(f'<line class="a" x1="{LEFT}" x2="{WIDTH - 16}" y1="{bottom}" y2="{bottom}"/>')
    x = float(LEFT)
    out.append(f'<text class="t" x="{x}" y="{top - 6}">{escape(panel.title)}</text>')
    x += 7.2 * len(panel.title) + 14
    for (name, line), colour in zip(panel.lines.items(), COLOURS, strict=False):
        dots = " ".join(
            f"{LEFT + at * per_second:.1f},{bottom - HEIGHT * y / ceiling:.1f}" for at, y in line
        )
        out.append(f'<path stroke="{colour}" d="M{dots}"/>' if dots else "")
        if len(panel.lines) > 1:
            out.append(f'<text x="{x:.1f}" y="{top - 6}" style="fill:{colour}">{escape(name)}')
            out[-1] += "</text>"
            x += 7.0 * len(name) + 14
    return out


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _step(least: float) -> float:
    """The next of 1, 2, 5, 10, ... that is not smaller."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
