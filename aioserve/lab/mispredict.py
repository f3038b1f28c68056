"""The command `mispredict`: what policies that need predictions lose as these get worse.

Runs every policy on the same requests: with predictions of each error, and without. Draws curves
over the error as SVG and as an HTML page in the style of the lab's reports, which needs no
network.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby
from math import ceil, floor, log10

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import (
    CONFIG_HELP,
    add_common,
    add_jobs,
    add_output,
    add_workload,
    read_card,
    read_jobs,
    read_workloads,
    running,
)
from aioserve.lab.comparison.candidates import Candidate, load_candidates, prepare
from aioserve.lab.comparison.document import (
    Apart,
    apart_in,
    classes_of,
    mean_of,
    measure_groups,
)
from aioserve.lab.comparison.measures import Row, key, number, parse_measure, tidy
from aioserve.lab.comparison.report import html_table, static_page, write_curves
from aioserve.lab.simulation.run import Progress
from aioserve.lab.slo import ServiceLevels, StatedSlo
from aioserve.lab.terminal import in_columns, paint
from aioserve.lab.workloads.synthetic import (
    AnyPrediction,
    parse_prediction,
    with_predictions,
    without_predictions,
)
from aioserve.lab.workloads.workload import Workload
from aioserve.support.arguments import Parser

#: By kind: what a size is called, what it is, and whether a greater one is a worse prediction.
KINDS = {
    "lognormal": ("sigma", "standard deviation of the logarithm of predicted over true", True),
    "ranks": ("tau", "Kendall's rank correlation of predicted and true lengths", False),
    "classes": ("accuracy", "share of predictions in the right class", False),
}
DEFAULT = "lognormal:0,0.25,0.5,1,2"


class Errors(msgspec.Struct, frozen=True):
    """One kind of error in several sizes, from good predictions to bad ones."""

    kind: str
    sizes: tuple[float, ...]
    predictions: tuple[AnyPrediction, ...]  # of each size

    @classmethod
    def parse(cls, text: str) -> "Errors":
        """Read `lognormal:0,0.5,1`, `ranks:1,0.5,0` or `classes:64,256:1,0.8`. Raises
        `ConfigError`.
        """
        head, _, written = text.rpartition(":")
        kind = head.partition(":")[0]
        if kind not in KINDS or (kind == "classes") != (":" in head):
            raise ConfigError(
                "errors look like lognormal:0,0.5,1 (sigma), ranks:1,0.5,0 (Kendall's tau) or "
                f"classes:64,256:1,0.8,0.5 (bounds in tokens, accuracy); got {text!r}"
            )
        predictions = {part: parse_prediction(f"{head}:{part}") for part in written.split(",")}
        sizes = sorted((float(part), p) for part, p in predictions.items())
        if not KINDS[kind][2]:
            sizes.reverse()
        return cls(kind, tuple(s for s, _ in sizes), tuple(p for _, p in sizes))


# The runs: every policy on the same requests, with predictions of each error and without.


class Point(msgspec.Struct, frozen=True):
    """One policy with predictions of one error; the value is in the unit of the measure's row."""

    error: float
    value: float
    against_baseline: Apart
    against_blind: Apart  # the same policy without predictions


class Curve(msgspec.Struct, frozen=True):
    """One policy, from good predictions to bad ones, and without any."""

    policy: str
    blind: float
    blind_against_baseline: Apart
    points: list[Point]


class Curves(msgspec.Struct, frozen=True):
    """Several policies on one workload; plain data."""

    workload: str
    num_requests: int  # of the first seed, in `seconds`
    seconds: float
    seeds: list[int]
    measure: str  # as `parse_measure` reads it
    kind: str  # of the errors
    baseline: str  # a policy that gets no predictions
    baseline_value: float
    curves: list[Curve]


def measure_curves(
    candidates: Sequence[Candidate],
    baseline: Candidate,
    workloads: Sequence[Workload],
    errors: Errors,
    row: Row,
    *,
    slo: Sequence[StatedSlo] = (),
    clip: bool = False,
    num_jobs: int = 1,
    progress: Progress = lambda count: None,
) -> Curves:
    """Run each candidate with predictions of each error and without, and the baseline without.
    `workloads` are one for each seed. Raises `ConfigError` for a measure that no request has.
    """
    ready, told, _ = prepare([baseline, *candidates], list(workloads), is_live=False, clip=clip)
    blind = [without_predictions(workload) for workload in told]
    by_error = [
        [with_predictions(w, prediction) for w in told] for prediction in errors.predictions
    ]
    groups = [[(ready[0].config, workload) for workload in blind]]
    for candidate in ready[1:]:
        groups += [[(candidate.config, w) for w in loads] for loads in (blind, *by_error)]
    levels = ServiceLevels.of(slo, classes_of(told))
    base, *others = measure_groups(groups, levels, num_jobs, progress)
    baseline_value = mean_of(base, row)
    curves = []
    for i, candidate in enumerate(candidates):
        alone, *with_errors = others[i * (1 + len(by_error)) : (i + 1) * (1 + len(by_error))]
        points = [
            Point(
                error, mean_of(group, row), apart_in(base, group, row), apart_in(alone, group, row)
            )
            for error, group in zip(errors.sizes, with_errors, strict=True)
        ]
        against = apart_in(base, alone, row)
        curves.append(Curve(candidate.name, mean_of(alone, row), against, points))
    first = workloads[0]
    return Curves(
        first.name,
        len(first.requests),
        tidy(first.duration),
        [workload.seed for workload in workloads],
        key(row),
        errors.kind,
        baseline.name,
        baseline_value,
        curves,
    )


# The curves in words: a table, and where each policy falls behind.


#: What a verdict says of a policy beside what it is compared with; any other: level with it.
STANDS = {"better": "ahead of", "worse": "behind"}
LEVEL = "not distinguishable from"


def headline(curves: Curves) -> str:
    """Return what was measured, in one line."""
    row, (symbol, meaning, _) = parse_measure(curves.measure), KINDS[curves.kind]
    seeds = f"{len(curves.seeds)} seeds" if len(curves.seeds) > 1 else "1 seed, hence no intervals"
    better = "more" if row.good > 0 else "less"
    return (
        f"{curves.workload}: {curves.num_requests} requests in {curves.seconds:.0f} s, {seeds}; "
        f"{row.label}: {better} is better. {symbol}: {meaning}."
    )


def render(curves: Curves) -> str:
    """Return the table of all policies, and a paragraph on each, as text of fixed width."""
    row = parse_measure(curves.measure)
    head = ("policy", KINDS[curves.kind][0], "value", "against itself without", "", "against", "")
    lines = [headline(curves), ""]
    table = [[*head[:5], f"against {curves.baseline}", ""]]
    table.append([curves.baseline, "none", number(curves.baseline_value, row), "", "", "", ""])
    for curve in curves.curves:
        apart = curve.blind_against_baseline
        blind = number(curve.blind, row)
        table.append([curve.policy, "none", blind, "", "", apart.in_words(row), apart.verdict])
        for point in curve.points:
            table.append(
                [
                    "",
                    f"{point.error:g}",
                    number(point.value, row),
                    point.against_blind.in_words(row),
                    point.against_blind.verdict,
                    point.against_baseline.in_words(row),
                    point.against_baseline.verdict,
                ]
            )
    lines += in_columns(table, left=(0, 6))
    lines += ["", *(sentence for curve in curves.curves for sentence in in_words(curve, curves))]
    return "\n".join(lines)


def in_words(curve: Curve, curves: Curves) -> list[str]:
    """Return where the policy falls behind the baseline, and where behind itself without
    predictions.
    """
    row = parse_measure(curves.measure)
    sizes = [point.error for point in curve.points]
    symbol = KINDS[curves.kind][0]
    against = [point.against_baseline for point in curve.points]
    said = f"{curve.policy} is {_stretches(sizes, against, curves.baseline, symbol)}"
    at = crossing(sizes, [apart.value for apart in against], row)
    if at is not None:
        said += f"; the means cross at about {symbol} {at:.2g}"
    blind = [point.against_blind for point in curve.points]
    itself = "itself without predictions"
    return [f"{said}. It is {_stretches(sizes, blind, itself, symbol)}."]


def crossing(sizes: Sequence[float], differences: Sequence[float], row: Row) -> float | None:
    """Return the first error at which the mean falls behind, on a straight line between two that
    were measured. None: it never does, or from the first on.
    """
    ahead = [difference * row.good for difference in differences]
    for i in range(1, len(sizes)):
        if ahead[i - 1] >= 0 > ahead[i] and ahead[0] > 0:
            share = ahead[i - 1] / (ahead[i - 1] - ahead[i])
            return sizes[i - 1] + share * (sizes[i] - sizes[i - 1])
    return None


def _stretches(sizes: Sequence[float], against: Sequence[Apart], other: str, symbol: str) -> str:
    """`ahead of fcfs at sigma 0 to 0.5, behind it at 1 and 2`, by what the intervals say."""
    stands = [STANDS.get(apart.verdict, LEVEL) for apart in against]
    found = [
        (stand, [size for _, size in pairs])
        for stand, pairs in groupby(zip(stands, sizes, strict=True), key=lambda pair: pair[0])
    ]
    if len(found) == 1:
        return f"{found[0][0]} {other} at every {symbol} from {sizes[0]:g} to {sizes[-1]:g}"
    parts: list[str] = []
    for stand, own in found:
        where = f"{own[0]:g}" if len(own) == 1 else f"{own[0]:g} to {own[-1]:g}"
        what = f"{other} at {symbol}" if not parts else "it at"
        parts.append(f"{stand} {what} {where}")
    return ", ".join(parts)


# The chart, as SVG: a panel for each policy, with the baseline as a dashed line and the policy
# without predictions as a dotted one. A bar (95% interval) across the dashed line: no difference.


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
    """Return the panels, all with the same axis, which does not begin at 0."""
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


# The curves as one HTML file.


def render_page(curves: Curves) -> str:
    """Return the report on these curves, as HTML."""
    title = "Policies over the error of predictions"
    parts = [f"<h1>{title}</h1>", f"<p>{escape(headline(curves))}</p>"]
    parts.append(f'<div class="panel">{draw(curves)}</div>')
    for curve in curves.curves:
        parts += [f"<p>{escape(text)}</p>" for text in in_words(curve, curves)]
    parts.append(_table(curves))
    return static_page(title, "\n".join(parts))


def _table(curves: Curves) -> str:
    """Return a row for each policy and error, with the differences and their 95% intervals."""
    row = parse_measure(curves.measure)
    heads = ["policy", KINDS[curves.kind][0], row.label, f"against {curves.baseline}"]
    heads += ["against itself without predictions"]
    rows = [[curves.baseline, "none", number(curves.baseline_value, row), "", ""]]
    for curve in curves.curves:
        apart = curve.blind_against_baseline
        words = f"{apart.in_words(row)} {apart.verdict}"
        rows.append([curve.policy, "none", number(curve.blind, row), words, ""])
        for point in curve.points:
            against = [
                f"{apart.in_words(row)} {apart.verdict}"
                for apart in (point.against_baseline, point.against_blind)
            ]
            rows.append(["", f"{point.error:g}", number(point.value, row), *against])
    return html_table(heads, (map(escape, cells) for cells in rows))


# The command.


def run_mispredict(words: Sequence[str]) -> int:
    """`aioserve mispredict`; returns the exit code. Raises `AioserveError`."""
    arguments = _parser().parse_args(words)
    row = parse_measure(arguments.measure)
    settings = [*read_card(arguments), *arguments.set]
    baseline, *candidates = load_candidates([arguments.against, *arguments.configs], settings)
    workloads = read_workloads(arguments)
    errors: Errors = arguments.errors
    num_runs = 1 + len(candidates) * (1 + len(errors.sizes))
    with running(num_runs * sum(len(workload.requests) for workload in workloads)) as report:
        curves = measure_curves(
            candidates,
            baseline,
            workloads,
            errors,
            row,
            slo=arguments.slo,
            clip=arguments.clip,
            num_jobs=read_jobs(arguments, workloads, num_runs),
            progress=report,
        )
    print(paint(render(curves)))
    write_curves(arguments, curves, draw, render_page)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "mispredict",
        description="Run policies that need predicted lengths of replies with predictions that get "
        "worse and worse, and say where each falls behind a policy without predictions.",
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help=CONFIG_HELP)
    add_workload(parser, predict=False)
    parser.add_argument(
        "--against",
        metavar="CONFIG",
        default="chunked_prefill",
        help="baseline, which gets no predictions",
    )
    parser.add_argument(
        "--errors",
        type=Errors.parse,
        metavar="KIND:SIZES",
        default=DEFAULT,
        help="errors of predictions: lognormal:SIGMA,... (factors with that spread); "
        "ranks:TAU,... (orders with that rank correlation); classes:BOUND,...:ACCURACY,...",
    )
    parser.add_argument(
        "--measure",
        metavar="NAME",
        default="e2e:mean",
        help="what the curves show, such as ttft:p99, e2e:mean, good_share",
    )
    add_common(parser)
    add_jobs(parser)
    add_output(parser, "--html", help="write a report with a chart to this HTML file")
    add_output(parser, "--svg", help="write the chart to this SVG file")
    return parser
