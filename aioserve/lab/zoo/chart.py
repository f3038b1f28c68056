"""The chart of the zoo, as SVG: a row for each policy, a column for each workload, blue is good.

Its colours follow the reader's choice of light or dark. Knows the board; measures nothing.
"""

from collections.abc import Sequence
from html import escape

from aioserve.lab.zoo.standard import WORKLOADS
from aioserve.lab.zoo.standing import OVERALL, Standing

LEFT, COLUMN, ROW, TOP, BOTTOM = 190, 84, 24, 58, 82
NUM_SHADES = 10
LEAST, MOST = 0.4, 0.96  # shares from the first shade to the last: most policies are between
COLUMNS = (*WORKLOADS, OVERALL)
TITLE = "In time, % of requests and programs, mean over classes: the bluer, the better"
FRAME = (
    "A frame: no policy of the column is surely better, by the 95% interval of the differences, "
    "seed by seed.",
    "A low share can have one, where seeds differ much, and a higher share none, where they differ "
    "little.",
)
# Of each shade: its colour and that of the number in it, from little to much, light and dark.
LIGHT = [
    *(("#f4f6f9", "#24272b"), ("#e6edf5", "#24272b"), ("#d5e2ef", "#24272b")),
    *(("#c0d5e8", "#24272b"), ("#a6c4df", "#24272b"), ("#88b0d3", "#1b1e21")),
    *(("#6899c5", "#111315"), ("#4479ab", "#ffffff"), ("#33689c", "#ffffff")),
    ("#1f4f80", "#ffffff"),
]
DARK = [
    *(("#1e2227", "#e4e6e8"), ("#212a33", "#e4e6e8"), ("#243341", "#e4e6e8")),
    *(("#283e52", "#e4e6e8"), ("#2d4b66", "#eceef0"), ("#33597c", "#f4f6f7")),
    *(("#3c6a94", "#ffffff"), ("#4678a5", "#ffffff"), ("#6a9ccb", "#0d0f11")),
    ("#93bde6", "#0d0f11"),
]


def draw(board: Sequence[Standing], marked: Sequence[str] = ()) -> str:
    """The shares in time of a board, in percent; rows of the policies `marked` are in bold."""
    width, height = LEFT + COLUMN * len(COLUMNS) + 12, TOP + ROW * len(board) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Share of requests in time, by policy and workload">',
        f"<style>{_style()}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="head" x="12" y="22">{TITLE}</text>',
    ]
    for i, workload in enumerate(COLUMNS):
        x = LEFT + COLUMN * i + COLUMN // 2
        parts.append(f'<text class="middle" x="{x}" y="{TOP - 10}">{workload}</text>')
    for k, standing in enumerate(board):
        y = TOP + ROW * k
        bold = " bold" if standing.name in marked else ""
        parts.append(
            f'<text class="name{bold}" x="{LEFT - 10}" y="{y + 16}">{escape(standing.name)}</text>'
        )
        parts += [_cell(standing, i, y) for i in range(len(COLUMNS))]
    parts += _legend(height - 60)
    return "\n".join([*parts, "</svg>", ""])


def _legend(y: int) -> list[str]:
    """The shades with the shares from which they are, and what a frame means (`FRAME`)."""
    parts = [f'<text class="small name" x="{LEFT - 10}" y="{y + 12}">from %</text>']
    for shade in range(NUM_SHADES):
        x, least = LEFT + 34 * shade, LEAST + (shade - 1) * (MOST - LEAST) / (NUM_SHADES - 2)
        text = f"{100 * least:.0f}" if shade else "0"
        parts.append(
            f'<rect class="s{shade}" x="{x + 1}" y="{y}" width="32" height="16" rx="2"/>'
            f'<text class="small middle t{shade}" x="{x + 17}" y="{y + 12}">{text}</text>'
        )
    parts += [
        f'<text class="small" x="{LEFT}" y="{y + 34 + 16 * i}">{text}</text>'
        for i, text in enumerate(FRAME)
    ]
    return parts


def _shade(share: float) -> int:
    """0 below `LEAST`, the last one from `MOST`, and equal parts between."""
    part = 1 + int((share - LEAST) / (MOST - LEAST) * (NUM_SHADES - 2) + 1e-9)
    return min(part, NUM_SHADES - 1) if share >= LEAST else 0


def _cell(standing: Standing, place: int, y: int) -> str:
    workload = COLUMNS[place]
    rank = standing.ranks[workload]
    shade = _shade(rank.value)
    x = LEFT + COLUMN * place
    gap = 4 if workload == OVERALL else 0
    best = " best" if rank.best == 1 else ""
    return (
        f'<rect class="s{shade}{best}" x="{x + gap + 1}" y="{y + 1}" width="{COLUMN - 2}" '
        f'height="{ROW - 2}" rx="2"/><text class="middle t{shade}" x="{x + gap + COLUMN // 2}" '
        f'y="{y + 16}">{100 * rank.value:.0f}</text>'
    )


def _style() -> str:
    base = (
        "text{font:13px system-ui,sans-serif;fill:var(--ink)}.head{font-weight:600}"
        ".small{font-size:11px;fill:var(--faint)}.name{text-anchor:end}.bold{font-weight:700}"
        ".middle{text-anchor:middle}.paper{fill:var(--paper)}"
        ".best{stroke:var(--frame);stroke-width:2}"
    )
    light = ":root{--ink:#24272b;--faint:#5d636a;--paper:#fff;--frame:#d0652f}" + _shades(LIGHT)
    dark = ":root{--ink:#e4e6e8;--faint:#a3a9b0;--paper:#17191c;--frame:#ef9560}" + _shades(DARK)
    return f"{base}{light}@media (prefers-color-scheme: dark){{{dark}}}"


def _shades(colours: list[tuple[str, str]]) -> str:
    return "".join(
        f".s{i}{{fill:{fill}}}text.t{i}{{fill:{ink}}}" for i, (fill, ink) in enumerate(colours)
    )
