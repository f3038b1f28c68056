"""The chart of curves over the error of predictions, as SVG: a panel for each policy.

Each panel has the baseline as a dashed line, the policy without predictions as a dotted one, and
bars that are the 95% intervals of the difference from the baseline: a bar across the dashed line
says that the two cannot be told apart. Knows curves; measures nothing.
"""

from html import escape
from math import ceil, floor, log10

from aioserve.lab.comparison.rows import number, parse_measure
from aioserve.lab.mispredict.curves import Curve, Curves
from aioserve.lab.mispredict.errors import KINDS

COLUMNS, WIDTH, HEIGHT = 3, 300, 210  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 40  # around its plot
HEAD = 54
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:var(--ink)}.head{font-size:13px;font-weight:600}"
    ".small{font-size:11px;fill:var(--faint)}.end{text-anchor:end}.middle{text-anchor:middle}"
    ".paper{fill:var(--paper)}.grid{stroke:var(--grid)}.base{stroke:var(--base);stroke-width:1.5;"
    "stroke-dasharray:6 4}.blind{stroke:var(--faint);stroke-width:1.5;stroke-dasharray:1.5 3.5}"
    ".curve{fill:none;stroke:var(--curve);stroke-width:2}.bar{stroke:var(--curve);"
    "stroke-width:1.5;opacity:.6}.dot{fill:var(--curve)}"
    ":root{--ink:#24272b;--faint:#5d636a;--paper:#fff;--grid:#e3e6ea;--base:#c4562a;"
    "--curve:#33689c}@media (prefers-color-scheme: dark){:root{--ink:#e4e6e8;--faint:#a3a9b0;"
    "--paper:#17191c;--grid:#2c3137;--base:#ef9560;--curve:#7fb0e0}}"
)


def draw(curves: Curves) -> str:
    """The panels, all with the same axis, which does not begin at 0."""
    num_rows = ceil(len(curves.curves) / COLUMNS)
    columns = min(COLUMNS, len(curves.curves))
    width, height = max(columns * WIDTH, 620), HEAD + num_rows * HEIGHT + 4
    label, symbol = parse_measure(curves.measure).label, KINDS[curves.kind][0]
    ticks = _ticks(curves)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)} over the error of predictions, by policy">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="head" x="12" y="20">{escape(curves.workload)}: {escape(label)} over '
        f"{escape(symbol)}, {escape(KINDS[curves.kind][1])}</text>",
        f'<line class="base" x1="12" x2="40" y1="38" y2="38"/><text class="small" x="46" y="42">'
        f"{escape(curves.baseline)}, no predictions</text>",
        '<line class="blind" x1="222" x2="250" y1="38" y2="38"/><text class="small" x="256" y="42">'
        "the policy without predictions</text>",
        '<line class="bar" x1="452" x2="452" y1="31" y2="45"/><text class="small" x="460" y="42">'
        "95% interval</text>",
    ]
    for i, curve in enumerate(curves.curves):
        x, y = (i % COLUMNS) * WIDTH, HEAD + (i // COLUMNS) * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_panel(curve, curves, ticks)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(curves: Curves) -> list[float]:
    """Round values that hold the baseline, every point and every interval between them."""
    base = curves.baseline_value
    values = [base]
    for point in (point for curve in curves.curves for point in curve.points):
        apart = point.against_baseline
        ends = (apart.low, apart.high)
        values += [point.value, *(base + end for end in ends if end is not None)]
    low, high = min(values), max(values)
    room = (high - low) / 3 or abs(high) / 3 or 1.0
    unit = 10.0 ** floor(log10(room))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= room)
    first = floor(low / step)
    return [step * i for i in range(first, max(ceil(high / step), first + 1) + 1)]


def _panel(curve: Curve, curves: Curves, ticks: list[float]) -> str:
    row = parse_measure(curves.measure)
    bottom, right, low, high = HEIGHT - BOTTOM, WIDTH - RIGHT, ticks[0], ticks[-1]
    step = (right - LEFT - 24) / max(len(curve.points) - 1, 1)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - TOP)

    def across(name: str, value: float) -> str:
        at = f'y1="{y(value):.1f}" y2="{y(value):.1f}"'
        return f'<line class="{name}" x1="{LEFT}" x2="{right}" {at}/>'

    parts = [f'<text class="head" x="{LEFT}" y="16">{escape(curve.policy)}</text>']
    for tick in ticks:
        at = f'x="{LEFT - 6}" y="{y(tick) + 4:.1f}"'
        parts += [across("grid", tick), f'<text class="small end" {at}>{tick:g}</text>']
    parts.append(across("base", curves.baseline_value))
    if low <= curve.blind <= high:
        parts.append(across("blind", curve.blind))
    else:
        said = f"without predictions: {number(curve.blind, row)}, off the axis"
        parts.append(f'<text class="small" x="{LEFT}" y="{TOP - 4}">{said}</text>')
    places = []
    for i, point in enumerate(curve.points):
        x, apart = LEFT + 12 + i * step, point.against_baseline
        places.append(f"{x:.1f},{y(point.value):.1f}")
        if apart.low is not None and apart.high is not None:
            ends = [y(curves.baseline_value + end) for end in (apart.low, apart.high)]
            at = f'y1="{ends[0]:.1f}" y2="{ends[1]:.1f}"'
            parts.append(f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" {at}/>')
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{y(point.value):.1f}" r="3.5"/>'
            f'<text class="small middle" x="{x:.1f}" y="{bottom + 16}">{point.error:g}</text>'
        )
    parts.append(f'<polyline class="curve" points="{" ".join(places)}"/>')
    return "".join(parts)
