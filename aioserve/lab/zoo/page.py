"""The zoo's results as text, as a chart in SVG, and as one HTML file.

Knows results and ranks; measures nothing. The report has the style of the lab's reports, and needs
no network and no script.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean

from aioserve.lab.comparison.bootstrap import MIN_SEEDS
from aioserve.lab.comparison.measures import IN_TIME, MILLION, SECONDS_PER_HOUR, Row, number
from aioserve.lab.comparison.report import html_table, static_page
from aioserve.lab.zoo.standing import (
    JOULES,
    MEASURES,
    OVERALL,
    REFERENCE,
    UNFINISHED,
    WORKLOADS,
    Entry,
    Results,
    Standing,
    columns_of,
    key,
    leaderboard,
    mean_of,
    meaning,
    ranks_of,
    surely_less,
)

PRICE = "price, 1M"
OUTPUT_TOKENS = next(row for row in MEASURES if row.statistic == "output_tokens_per_second")
NUM_NEIGHBOURS = 2  # policies above, and below, that are named beside one


def render_board(results: Results, price_per_hour: float | None = None) -> str:
    """Return a line for each policy, the best overall first; with the price of a million output
    tokens where an hour of the machine has one.
    """
    board, costs = leaderboard(results), _costs(results, price_per_hour)
    name_width = max(len(standing.name) for standing in board)
    head = [f"{'rank':14}{'policy':{name_width}}"]
    head += [f"{name:>11}" for name in (*WORKLOADS, OVERALL, *costs)]
    lines = [f"{title(results)}: in time, %", *on_machine(results), "".join(head)]
    for standing in board:
        cells = [f"{100 * standing.ranks[w].value:11.1f}" for w in (*WORKLOADS, OVERALL)]
        cells += [f"{said(results.policies[standing.name]):>11}" for said in costs.values()]
        lines.append(f"{standing.overall!s:14}{standing.name:{name_width}}{''.join(cells)}")
    if price_per_hour is not None:
        lines.append(f"{PRICE}: the price of a million output tokens, the mean over the workloads")
    return "\n".join(lines)


def _costs(results: Results, price_per_hour: float | None) -> dict[str, Callable[[Entry], str]]:
    """Return the columns of a board that say what a policy costs: joules where they are known of
    the machine, else CPU time; and the price of a million output tokens, if an hour has one.
    """
    if any(not math.isnan(joules(entry)) for entry in results.policies.values()):
        found: dict[str, Callable[[Entry], str]] = {"J a token": lambda e: f"{joules(e):.3f}"}
    else:
        found = {"us a step": lambda e: "-" if e.cost is None else f"{e.cost.us:,.0f}"}
    if price_per_hour is not None:
        found[PRICE] = lambda e: f"{price_of(e, price_per_hour):.3f}"
    return found


def joules(entry: Entry) -> float:
    """Return joules per output token, the mean over the workloads; NaN: not known."""
    return mean_of(entry, OVERALL, JOULES)


def price_of(entry: Entry, price_per_hour: float) -> float:
    """Return the price of a million output tokens, the mean over the workloads, on a machine whose
    hour costs `price_per_hour`.
    """
    seconds = [MILLION / max(mean_of(entry, w, OUTPUT_TOKENS), 1e-9) for w in WORKLOADS]
    return price_per_hour / SECONDS_PER_HOUR * fmean(seconds)


def on_machine(results: Results) -> list[str]:
    """Return what a measured machine is, and how much faster requests come to it."""
    if not results.machine:
        return []
    faster = ", ".join(f"{w} {1 / scale:.2f}" for w, scale in results.scales.items())
    return [
        f"on {results.machine}; arrivals as many times faster as leave {REFERENCE} as many in "
        f"time: {faster}"
    ]


def title(results: Results) -> str:
    """Version, digest and number of seeds: what makes two results comparable."""
    seeds = results.num_seeds
    of_seeds = f"{seeds} seeds" if seeds > 1 else "1 seed, so that ranks have no ranges"
    return f"{results.standard} ({results.digest}), {of_seeds}"


def render_policy(results: Results, name: str) -> str:
    """Return one policy: its place, whom it beats, and value and rank by measure and workload."""
    [standing] = [s for s in leaderboard(results) if s.name == name]
    lines = [place_in_words(standing), *against_in_words(results, name)]
    lines += filter(
        None, [unfinished_in_words(results, name), cost_in_words(results.policies[name])]
    )
    lines += ["", f"{'value (rank)':22}" + "".join(f"{w:>17}" for w in WORKLOADS)]
    for row in MEASURES:
        cells = [cell(results, name, workload, row) for workload in WORKLOADS]
        if any(text != "-" for text in cells):
            lines.append(f"{row.label:22}" + "".join(f"{text:>17}" for text in cells))
    return "\n".join(lines)


def place_in_words(standing: Standing) -> str:
    """`Mine: rank 3 (2 to 5) of 26, 71.4% in time over all workloads`."""
    overall = standing.overall
    return (
        f"{standing.name}: rank {overall} of {overall.of}, {100 * overall.value:.1f}% in time over "
        "all workloads"
    )


def cost_in_words(entry: Entry) -> str:
    """Return what a step of the policy costs; "" if it was not measured."""
    if (cost := entry.cost) is None:
        return ""
    return (
        f"{cost.us:,.0f} microseconds of CPU per schedule() with {cost.running:,} running and "
        f"{cost.waiting:,} waiting, {cost.ratio:.1f} times what chunked_prefill takes "
        f"({cost.machine})"
    )


def against_in_words(results: Results, name: str) -> list[str]:
    """Return which policies are worse, better and not told apart, by the share in time overall; of
    one seed, which tells none apart, the nearest ones.
    """
    if results.num_seeds < MIN_SEEDS:
        return [_between(leaderboard(results), name)]
    less = surely_less(columns_of(results, OVERALL, IN_TIME))
    better = [other for other in results.policies if other in less[name]]
    worse = [other for other in results.policies if name in less[other]]
    left = [other for other in results.policies if other not in (name, *better, *worse)]
    kinds = {"better than": better, "worse than": worse, "not told apart from": left}
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]


def _between(board: list[Standing], name: str) -> str:
    """Return the neighbours of a policy on the board, with their numbers."""
    place = [standing.name for standing in board].index(name)

    def listed(standings: list[Standing]) -> str:
        return ", ".join(f"{s.name} {100 * s.overall.value:.1f}%" for s in standings)

    above = listed(board[max(place - NUM_NEIGHBOURS, 0) : place]) or "none"
    below = listed(board[place + 1 : place + 1 + NUM_NEIGHBOURS]) or "none"
    return (
        f"next above: {above}; next below: {below}; one seed does not say which differences are "
        "chance: leave --quick out"
    )


def unfinished_in_words(results: Results, name: str) -> str:
    """Return how many requests never ended, and that these count as missed; "" if all did."""
    counts = {w: mean_of(results.policies[name], w, UNFINISHED) for w in WORKLOADS}
    found = [f"{count:,.1f} of {workload}" for workload, count in counts.items() if count]
    if not found:
        return ""
    return f"requests rejected or not finished, which count as late: {', '.join(found)} a seed"


def cell(results: Results, name: str, workload: str, row: Row) -> str:
    """Value and rank, such as `68.0 (5)`; `-`: undefined there."""
    value = mean_of(results.policies[name], workload, row)
    text = number(value * row.factor, row)
    rank = ranks_of(results, workload, row).get(name)
    return text if rank is None else f"{text} ({rank.rank})"


def as_document(
    results: Results, names: list[str], price_per_hour: float | None = None
) -> dict[str, object]:
    """Return all of it as plain data: the board, and for the named policies each value and rank;
    with the price of a million output tokens by policy, if an hour of the machine has a price.
    """
    prices = {}
    if price_per_hour is not None:
        prices = {name: price_of(entry, price_per_hour) for name, entry in results.policies.items()}
    ranks = {w: {key(row): ranks_of(results, w, row) for row in MEASURES} for w in WORKLOADS}
    return {
        "standard": results.standard,
        "digest": results.digest,
        "seeds": results.num_seeds,
        "aioserve": results.aioserve,
        "workloads": list(WORKLOADS),
        "board": leaderboard(results),
        **({"price_per_million_output": prices} if prices else {}),
        "policies": {
            name: {
                "cost": results.policies[name].cost,
                "scores": results.policies[name].scores,
                "ranks": {
                    workload: {measure: of.get(name) for measure, of in by_measure.items()}
                    for workload, by_measure in ranks.items()
                },
            }
            for name in names
        },
    }


# The chart, as SVG in light and dark: a row for each policy, a column for each workload.


LEFT, COLUMN, ROW, TOP, BOTTOM = 190, 84, 24, 58, 82
NUM_SHADES = 10
LEAST, MOST = 0.4, 0.96  # shares from the first shade to the last: most policies are between
COLUMNS = (*WORKLOADS, OVERALL)
TITLE = "In time, % of requests and programs, mean over classes: the bluer, the better"
FRAME = (
    "A frame: no policy of the column is surely better, where all pairs of it are tested at once "
    "(Holm, 95%).",
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
    """Return the shares in time of a board, in percent; rows of the policies `marked` are in
    bold.
    """
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
    """Return the shades with the shares from which they are, and what a frame means (`FRAME`)."""
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


# The report as one HTML file: the chart, the board, and the named policies by measure.


RANKS = (
    "A rank has a range where chance leaves one open: it counts the policies that are surely "
    "better or worse, where all pairs of policies are tested at once (Student's test of the "
    "differences, seed by seed, with Holm's correction): with a probability of 95% all ranges of a "
    "column hold."
)


def render_page(results: Results, names: Sequence[str], price_per_hour: float | None = None) -> str:
    """Return the page; `names` are the policies that are shown by every measure. An hour of the
    machine may have a price.
    """
    board = leaderboard(results)
    parts = [f"<h1>The zoo: {escape(title(results))}</h1>"]
    parts.append(f'<p class="faint">{escape(RANKS)}</p>')
    for standing in board:
        if standing.name in names:
            parts.append(f"<p><b>{escape(place_in_words(standing))}</b></p>")
    parts.append(f'<div class="panel">{draw(board, names)}</div>')
    parts += ["<h2>All policies</h2>", _board(results, price_per_hour)]
    for name in names:
        parts += [f"<h2>{escape(name)}</h2>"]
        words = [*against_in_words(results, name), unfinished_in_words(results, name)]
        words.append(cost_in_words(results.policies[name]))
        parts += [f"<p>{escape(text)}</p>" for text in words if text]
        parts.append(_measures(results, name))
    parts.append("<h2>What the measures mean</h2><dl class='meanings'>")
    parts += [f"<dt>{escape(r.label)}</dt><dd>{escape(meaning(r))}</dd>" for r in MEASURES]
    return static_page(f"The zoo: {title(results)}", "\n".join([*parts, "</dl>"]))


def _board(results: Results, price_per_hour: float | None) -> str:
    rows, costs = [], _costs(results, price_per_hour)
    for standing in leaderboard(results):
        ranks = [standing.ranks[w] for w in (*WORKLOADS, OVERALL)]
        cells = [f"{100 * rank.value:.1f} <span class='faint'>#{rank}</span>" for rank in ranks]
        cells += [said(results.policies[standing.name]) for said in costs.values()]
        rows.append([escape(standing.name), *cells])
    return html_table(["policy", *WORKLOADS, OVERALL, *costs], rows)


def _measures(results: Results, name: str) -> str:
    rows = []
    for row in MEASURES:
        cells = []
        for workload in WORKLOADS:
            value = mean_of(results.policies[name], workload, row) * row.factor
            rank = ranks_of(results, workload, row).get(name)
            place = "" if rank is None else f" <span class='faint'>#{rank}</span>"
            cells.append(number(value, row) + place)
        rows.append([escape(row.label), *cells])
    return html_table(["value (rank)", *WORKLOADS], rows)
