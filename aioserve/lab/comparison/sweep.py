"""The command `sweep`: a configuration with several values of one setting; or curves over load.

Knows what differs from `compare`. DistServe (OSDI'24) and the papers after it draw schedulers over
load: the share of requests within their SLO over the rate of arrivals, and the goodput, which is
how many of them there are a second. `search` finds the rate at which one curve crosses a target;
here are the whole curves, in words, as SVG and as one HTML file.
"""

import argparse
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, isnan, log10
from typing import Any

import msgspec
import numpy as np

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.arguments import (
    CONFIG_HELP,
    add_common,
    add_output,
    add_price,
    add_workload,
    is_list,
    read_card,
    read_jobs,
    read_workloads,
    running,
)
from aioserve.lab.comparison.bootstrap import (
    LEVEL,
    MIN_SEEDS,
    Sampling,
    compare_seeds,
    student_quantile,
)
from aioserve.lab.comparison.candidates import Candidate, load_candidates, prepare
from aioserve.lab.comparison.commands import add_quality_and_jobs, compare_all, write_reports
from aioserve.lab.comparison.document import Apart, Document, apart, classes_of, measure_groups
from aioserve.lab.comparison.knee import base_rate, goods_of
from aioserve.lab.comparison.measures import (
    EQUAL,
    ROWS,
    UNKNOWN,
    Row,
    RunMeasures,
    difference_of,
    number,
    rows_of,
    span,
    tidy,
    value_of,
)
from aioserve.lab.comparison.report import html_table, static_page, write_curves
from aioserve.lab.comparison.words import headline, remarks
from aioserve.lab.simulation.run import Progress
from aioserve.lab.slo import ServiceLevels, StatedSlo
from aioserve.lab.terminal import in_columns, paint
from aioserve.lab.workloads.workload import Workload
from aioserve.support.arguments import Parser, positive


def run_sweep(words: Sequence[str]) -> int:
    """`aioserve sweep`; returns the exit code. Raises `AioserveError`."""
    parser = Parser(
        "sweep",
        description="Run a configuration with several values of one setting; or, with --rates, "
        "several configurations at several rates of requests.",
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help=CONFIG_HELP)
    add_workload(parser)
    add_common(
        parser,
        set_help="setting to sweep, with several values separated by commas, such as "
        "scheduler.options.chunk_size=64,128,256; a --set with one value holds for all runs",
    )
    add_quality_and_jobs(parser)
    add_price(parser)
    add_output(parser, "--html", help="write a report with plots to this HTML file")
    add_load(parser)
    arguments = parser.parse_args(words)
    swept = [(name, value) for name, value in arguments.set if is_list(value)]
    if arguments.rates is not None:
        return sweep_load(arguments)
    for name in ("target", "svg"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for curves over load: give --rates as well")
    if len(arguments.configs) > 1:
        raise ConfigError("several configurations are swept over --rates only: give one")
    (arguments.config,) = arguments.configs
    if len(swept) != 1:
        written = " ".join(f"--set {name}={value}" for name, value in swept or arguments.set)
        raise ConfigError(
            "sweep needs one --set with several values, such as "
            f"--set scheduler.options.chunk_size=64,128,256, or --rates; got {written or 'none'}"
        )
    setting, values = swept[0][0], [value.strip() for value in swept[0][1].split(",")]
    others = [(name, value) for name, value in arguments.set if not is_list(value)]
    others = [*read_card(arguments), *others]
    candidates = [
        Candidate(value, EngineConfig.load(arguments.config, [*others, (setting, value)]))
        for value in values
    ]
    document = compare_all(arguments, candidates, read_workloads(arguments))
    document["sweep"] = {"setting": setting, "values": values}
    print(paint(render_sweep(document)))
    write_reports(arguments, document)
    return 0


# The table of a sweep: a line for each value, and its intervals against the first one.


BIASED = (
    "Whichever value is the best here is so by these very requests: `search` with the same --set "
    "chooses on one part and says what the choice is worth on another."
)
SWEEP_COLUMNS = (
    ("ttft", "p50"),
    ("ttft", "p99"),
    ("gap", "p50"),
    ("gap", "p99"),
    ("gap", "max"),
    ("e2e", "p50"),
    ("e2e", "p99"),
    ("totals", "output_tokens_per_second"),
    ("totals", "good_share"),
    ("totals", "joules_per_output_token"),
    ("totals", "joules_per_request"),
    ("totals", "price_per_million_output"),
)
#: What the legend says of columns whose unit their heads do not have, where they are shown.
UNITS = {
    "good_share": "the SLO in percent of the requests",
    "joules_per_output_token": "J in joules",
    "price_per_million_output": "the price of a million output tokens",
}


def render_sweep(document: Document) -> str:
    """Return a line per value of the setting, and one with the intervals against the first
    value.
    """
    results, setting = document["results"], document["sweep"]["setting"]
    rows = [
        row
        for row in rows_of(SWEEP_COLUMNS)
        if any(not isnan(value_of(result, row)) for result in results)
    ]
    lines = [[setting.rpartition(".")[2], *(_short(row) for row in rows)]]
    for result in results:
        lines.append([result["name"], *(number(value_of(result, row), row) for row in rows)])
        intervals = [_interval(result, row) for row in rows]
        if any(intervals):
            lines.append(["", *intervals])
    shown = in_columns(lines, left=())
    units = [text for name, text in UNITS.items() if any(row.statistic == name for row in rows)]
    shown += ["", ", ".join(["Durations in milliseconds", *units]) + "."]
    if len(lines) > 1 + len(results):
        shown.append(
            f"Below a value: the 95% interval of its ratio to that of {results[0]['name']}."
        )
    elif len(results) > 1:
        shown.append(f"There is {UNKNOWN}.")
    if len(results) > 1:
        shown.append(BIASED)
    head = [headline(document), *document["machines"]]
    return "\n".join([*head, "", *shown, *remarks(document)])


def _short(row: Row) -> str:
    label = row.label.replace("end to end", "e2e").removeprefix("output ")
    return label.split(",")[0]


def _interval(other: dict[str, Any], row: Row) -> str:
    """Return an interval as factors of the first value; in the row's unit where it has no factor,
    or is a share.
    """
    difference = difference_of(other, row)
    if difference is None or difference["low"] is None:
        return ""
    absolute = span(difference["low"] * row.factor, difference["high"] * row.factor, row)
    if difference["low_ratio"] is None or row.unit == "points" or absolute == EQUAL:
        return absolute
    return " .. ".join(f"{difference[end]:.2f}x" for end in ("low_ratio", "high_ratio"))


# Attainment over load: runs at each rate, and what comes of them.


ATTAINED = Row("within the SLO, %", "totals", "good_share", "points", 100, 1, 1)
#: What a point costs, where that is known; fields of `LoadPoint`.
COSTS = [
    row
    for row in ROWS
    if row.statistic
    in ("joules_per_output_token", "joules_per_request", "price_per_million_output")
]
TARGET = 0.9  # share within the SLO; what DistServe asks for


class Mean(msgspec.Struct, frozen=True):
    """A mean over the seeds, with its 95% interval by Student; of one seed there is none."""

    value: float
    low: float | None = None
    high: float | None = None


class LoadPoint(msgspec.Struct, frozen=True):
    """The outcome of one configuration at one rate."""

    rate: float  # requests, or conversations and programs that begin, per second
    good_share: Mean  # of the requests with limits; a program with limits counts once
    goodput_per_second: Mean
    against_first: Apart | None  # of the share, in percentage points; None for the first
    #: Means over the seeds; None where no watts of the machine are known, or no price is stated.
    joules_per_output_token: float | None = None
    joules_per_request: float | None = None
    price_per_million_output: float | None = None


class LoadCurve(msgspec.Struct, frozen=True):
    """One configuration, from the lowest rate to the highest."""

    name: str
    points: list[LoadPoint]
    #: The highest rate up to which the share is the target or more, on straight lines between the
    #: rates that were run; None: the share is below it at the lowest rate.
    attains_to: float | None


class LoadCurves(msgspec.Struct, frozen=True):
    """Several configurations on one workload at the same rates; plain data."""

    workload: str
    num_requests: int  # of the first seed
    seeds: list[int]
    slo: str  # in words
    target: float
    rates: list[float]
    curves: list[LoadCurve]


def measure_load(
    candidates: Sequence[Candidate],
    workloads: Sequence[Workload],
    rates: Sequence[float],
    *,
    slo: Sequence[StatedSlo] = (),
    target: float = TARGET,
    clip: bool = False,
    num_jobs: int = 1,
    progress: Progress = lambda count: None,
    price_per_hour: float | None = None,
) -> LoadCurves:
    """Run each candidate on each workload (one per seed) at each rate, in requests per second: the
    same requests in less or more time. An hour of the engine may have a price. Raises `ConfigError`
    for a workload without arrivals over time, or without limits.
    """
    rates = sorted(set(rates))
    ready, told, _ = prepare(list(candidates), list(workloads), is_live=False, clip=clip)
    levels = ServiceLevels.of(slo, classes_of(told))
    if levels is None:
        raise ConfigError(
            f"{told[0].name}: no request has an SLO; give one, such as --slo ttft=1,tpot=0.05"
        )
    loads = [[w.scaled(base_rate(w) / rate) for w in told] for rate in rates]
    runs = [[(c.config, workload) for workload in of_rate] for c in ready for of_rate in loads]
    groups = measure_groups(runs, levels, num_jobs, progress, price_per_hour)
    by_candidate = [groups[i : i + len(rates)] for i in range(0, len(groups), len(rates))]
    curves = []
    for place, (candidate, own) in enumerate(zip(ready, by_candidate, strict=True)):
        points = [
            _point(rate, runs_of_rate, first if place else None)
            for rate, runs_of_rate, first in zip(rates, own, by_candidate[0], strict=True)
        ]
        curves.append(LoadCurve(candidate.name, points, _attains_to(points, target)))
    return LoadCurves(
        told[0].name,
        len(told[0].requests),
        [workload.seed for workload in told],
        str(levels),
        target,
        [tidy(rate) for rate in rates],
        curves,
    )


def _point(
    rate: float, runs: Sequence[RunMeasures], first: Sequence[RunMeasures] | None
) -> LoadPoint:
    shares = [_share(run) for run in runs]
    goodput = [float(np.nansum(goods_of(run))) / run.totals["seconds"] for run in runs]
    against = None
    if first is not None:
        others = [_share(run) for run in first]
        value = ATTAINED.factor * float(np.mean(others))
        against = apart(compare_seeds(others, shares, Sampling()), ATTAINED, value)
    known = {
        row.statistic: tidy(float(np.mean([run.totals[row.statistic] for run in runs])))
        for row in COSTS
        if all(row.statistic in run.totals for run in runs)
    }
    return LoadPoint(tidy(rate), _mean(shares), _mean(goodput), against, **known)


def _share(run: RunMeasures) -> float:
    return float(np.nanmean(goods_of(run)))


def _mean(values: Sequence[float]) -> Mean:
    mean = float(np.mean(values))
    if len(values) < MIN_SEEDS:
        return Mean(tidy(mean))
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    reach = student_quantile(LEVEL, len(values) - 1) * error
    return Mean(tidy(mean), tidy(mean - reach), tidy(mean + reach))


def _attains_to(points: Sequence[LoadPoint], target: float) -> float | None:
    if points[0].good_share.value < target:
        return None
    for before, after in pairwise(points):
        high, low = before.good_share.value, after.good_share.value
        if low < target:
            part = (high - target) / (high - low)
            return tidy(before.rate + part * (after.rate - before.rate))
    return points[-1].rate


# The curves in words: a table, and up to which rate each configuration attains the target.


def load_headline(curves: LoadCurves) -> str:
    """Return what was run, in one line."""
    seeds = f"{len(curves.seeds)} seeds" if len(curves.seeds) > 1 else "1 seed, hence no intervals"
    return (
        f"{curves.workload}: {curves.num_requests} requests at {len(curves.rates)} rates, {seeds}, "
        f"in virtual time. Good is a request within its SLO: {curves.slo}."
    )


def render(curves: LoadCurves) -> str:
    """Return a line for each rate and configuration, and a sentence on each configuration."""
    table = [_heads(curves), *_cells(curves)]
    return "\n".join(
        [load_headline(curves), "", *in_columns(table, left=()), "", *in_words(curves)]
    )


def in_words(curves: LoadCurves) -> list[str]:
    """Return up to which rate each configuration keeps the target share within the SLO."""
    wanted, last = f"{100 * curves.target:g}% within the SLO", curves.rates[-1]
    found = []
    for curve in curves.curves:
        if curve.attains_to is None:
            said = f"has less than {wanted} at every rate, from {curves.rates[0]:g} requests/s on"
            if any(point.good_share.value >= curves.target for point in curve.points):
                said = f"has less than {wanted} at the lowest rate, {curves.rates[0]:g} requests/s"
        elif curve.attains_to == last:
            said = f"has {wanted} at every rate, up to {last:g} requests/s"
        else:
            said = f"has {wanted} up to about {curve.attains_to:.3g} requests/s"
        found.append(f"{curve.name} {said}.")
    return found


def _heads(curves: LoadCurves) -> list[str]:
    first = curves.curves[0].name
    heads = ["requests/s", "", ATTAINED.label, "95% interval", "goodput, requests/s"]
    heads += [row.label for row in _known_costs(curves)]
    return heads + ([f"against {first}, points", ""] if len(curves.curves) > 1 else [])


def _known_costs(curves: LoadCurves) -> list[Row]:
    """Return the costs that some point has."""
    points = [point for curve in curves.curves for point in curve.points]
    return [row for row in COSTS if any(getattr(p, row.statistic) is not None for p in points)]


def _cells(curves: LoadCurves) -> list[list[str]]:
    """Return a row of words for each rate and configuration, under `_heads`."""
    rows, known = [], _known_costs(curves)
    for i, rate in enumerate(curves.rates):
        for place, curve in enumerate(curves.curves):
            point = curve.points[i]
            share, against = point.good_share, point.against_first
            interval = ""
            if share.low is not None and share.high is not None:
                interval = f"{100 * max(share.low, 0):.1f} .. {100 * min(share.high, 1):.1f}"
            cells = [f"{rate:g}" if not place else "", curve.name, f"{100 * share.value:.1f}"]
            cells += [interval, f"{point.goodput_per_second.value:.2f}"]
            costs = [getattr(point, row.statistic) for row in known]
            cells += [
                "-" if cost is None else f"{row.factor * cost:.{row.digits}f}"
                for cost, row in zip(costs, known, strict=True)
            ]
            if len(curves.curves) > 1:
                cells += ["", ""] if against is None else [against.in_words(ATTAINED)]
                cells += [] if against is None else [against.verdict]
            rows.append(cells)
    return rows


# The curves as SVG: attainment on the left, goodput on the right, bars for the 95% intervals.


WIDTH, HEIGHT = 400, 270  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 34, 44  # around its plot
HEAD, LEGEND = 34, 20
LIGHT = ("#33689c", "#c4562a", "#4b8f4e", "#8a5aa8", "#9a7b1f", "#4a5560")
DARK = ("#7fb0e0", "#ef9560", "#86c98a", "#c39be0", "#d9bd5c", "#aab4bf")


def draw(curves: LoadCurves) -> str:
    """Return the two panels, with a legend; the colours follow the reader's light or dark."""
    height = HEAD + HEIGHT + LEGEND * ceil(len(curves.curves) / 2) + 8
    most = max(p.goodput_per_second.value for c in curves.curves for p in c.points)
    panels = (
        (ATTAINED.label, [0.0, 20.0, 40.0, 60.0, 80.0, 100.0], "good_share", 100.0),
        ("goodput, requests/s", _ticks(most), "goodput_per_second", 1.0),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" role="img" '
        'aria-label="SLO attainment and goodput over the rate of requests">',
        f"<style>{_style()}</style>",
        f'<rect class="paper" width="{2 * WIDTH}" height="{height}"/>',
        f'<text class="head" x="12" y="20">{escape(curves.workload)}: {escape(curves.slo)}</text>',
    ]
    for place, (label, ticks, field, factor) in enumerate(panels):
        at = f'transform="translate({place * WIDTH} {HEAD})"'
        parts.append(f"<g {at}>{_panel(curves, label, ticks, field, factor)}</g>")
    for place, curve in enumerate(curves.curves):
        x, y = LEFT + (place % 2) * WIDTH, HEAD + HEIGHT + LEGEND * (place // 2) + 8
        parts.append(
            f'<line class="curve c{place % len(LIGHT)}" x1="{x}" x2="{x + 26}" y1="{y}" y2="{y}"/>'
            f'<text x="{x + 34}" y="{y + 4}">{escape(curve.name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _ticks(most: float) -> list[float]:
    """Round values from 0 to `most` or a little more."""
    room = most / 4 or 1.0
    unit = 10.0 ** floor(log10(room))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= room)
    return [step * i for i in range(max(ceil(most / step), 1) + 1)]


def _panel(
    curves: LoadCurves, label: str, ticks: Sequence[float], field: str, factor: float
) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    first, last = curves.rates[0], curves.rates[-1]

    def x(rate: float) -> float:
        return LEFT + 10 + (rate - first) / ((last - first) or 1.0) * (right - LEFT - 20)

    def y(value: float) -> float:
        return bottom - min(max(value, 0.0), ticks[-1]) / ticks[-1] * (bottom - TOP)

    parts = [f'<text class="head" x="{LEFT}" y="{TOP - 12}">{escape(label)}</text>']
    for tick in ticks:
        at = f'y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" {at}/>')
        parts.append(
            f'<text class="small end" x="{LEFT - 6}" y="{y(tick) + 4:.1f}">{tick:g}</text>'
        )
    if field == "good_share":
        at = f'y1="{y(100 * curves.target):.1f}" y2="{y(100 * curves.target):.1f}"'
        parts.append(f'<line class="target" x1="{LEFT}" x2="{right}" {at}/>')
    for rate in curves.rates:
        at = f'x="{x(rate):.1f}" y="{bottom + 16}"'
        parts.append(f'<text class="small middle" {at}>{rate:g}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="small middle" x="{middle}" y="{bottom + 34}">requests/s</text>')
    for place, curve in enumerate(curves.curves):
        colour = f"c{place % len(LIGHT)}"
        places = []
        for point in curve.points:
            mean: Mean = getattr(point, field)
            places.append(f"{x(point.rate):.1f},{y(factor * mean.value):.1f}")
            if mean.low is not None and mean.high is not None:
                ends = f'y1="{y(factor * mean.low):.1f}" y2="{y(factor * mean.high):.1f}"'
                at = f'x1="{x(point.rate):.1f}" x2="{x(point.rate):.1f}" {ends}'
                parts.append(f'<line class="bar {colour}" {at}/>')
        parts.append(f'<polyline class="curve {colour}" points="{" ".join(places)}"/>')
    return "".join(parts)


def _style() -> str:
    base = (
        "text{font:12px system-ui,sans-serif;fill:var(--ink)}.head{font-size:13px;font-weight:600}"
        ".small{font-size:11px;fill:var(--faint)}.end{text-anchor:end}.middle{text-anchor:middle}"
        ".paper{fill:var(--paper)}.grid{stroke:var(--grid)}.target{stroke:var(--faint);"
        "stroke-dasharray:6 4}.curve{fill:none;stroke-width:2}.bar{stroke-width:1.5;opacity:.5}"
    )
    light = ":root{--ink:#24272b;--faint:#5d636a;--paper:#fff;--grid:#e3e6ea}" + _colours(LIGHT)
    dark = ":root{--ink:#e4e6e8;--faint:#a3a9b0;--paper:#17191c;--grid:#2c3137}" + _colours(DARK)
    return f"{base}{light}@media (prefers-color-scheme: dark){{{dark}}}"


def _colours(colours: Sequence[str]) -> str:
    return "".join(f".c{i}{{stroke:{colour}}}" for i, colour in enumerate(colours))


def render_page(curves: LoadCurves) -> str:
    """Return the report on the curves as one HTML file: the chart, the words and the table."""
    title = "SLO attainment over load"
    parts = [f"<h1>{title}</h1>", f"<p>{escape(load_headline(curves))}</p>"]
    parts.append(f'<div class="panel">{draw(curves)}</div>')
    parts += [f"<p>{escape(text)}</p>" for text in in_words(curves)]
    parts.append(html_table(_heads(curves), (map(escape, cells) for cells in _cells(curves))))
    return static_page(title, "\n".join(parts))


# What the command `sweep` has for load: arguments in, the curves in words and files out.


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add `--rates` and what belongs to it, which `sweep_load` reads."""
    group = parser.add_argument_group("attainment over load")
    group.add_argument(
        "--rates",
        type=_rates,
        metavar="R,R,...",
        help="requests per second (or conversations and programs that begin) at which to run every "
        "configuration, in the place of a --set with several values: the share within the SLO and "
        "the goodput at each",
    )
    group.add_argument(
        "--target",
        type=float,
        metavar="SHARE",
        help=f"share within the SLO of which the highest rate is told (default: {TARGET})",
    )
    add_output(group, "--svg", help="write the curves over the rate to this SVG file")


def _rates(text: str) -> list[float]:
    """Return the type of an argument that is several rates, separated by commas."""
    return [positive(part) for part in text.split(",")]


def sweep_load(arguments: argparse.Namespace) -> int:
    """Print and write the curves over load; returns the exit code. Raises `ConfigError`."""
    if swept := [name for name, value in arguments.set if is_list(value)]:
        raise ConfigError(f"--rates sweeps the rate: give --set {swept[0]} one value")
    for name in ("requests", "reading_speed"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} plays no part beside --rates")
    target = TARGET if arguments.target is None else arguments.target
    if not 0 < target <= 1:
        raise ConfigError(f"--target must be above 0 and at most 1, got {target:g}")
    candidates = load_candidates(arguments.configs, [*read_card(arguments), *arguments.set])
    workloads = read_workloads(arguments)
    num_runs = len(candidates) * len(arguments.rates)
    with running(num_runs * sum(len(workload.requests) for workload in workloads)) as report:
        curves = measure_load(
            candidates,
            workloads,
            arguments.rates,
            slo=arguments.slo,
            target=target,
            clip=arguments.clip,
            num_jobs=read_jobs(arguments, workloads, num_runs),
            progress=report,
            price_per_hour=arguments.price_per_hour,
        )
    print(paint(render(curves)))
    write_curves(arguments, curves, draw, render_page)
    return 0
