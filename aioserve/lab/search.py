"""The command `search`: the highest rate within an SLO, the fewest replicas, or options that suit.

Arguments in, words and a page out. `knee` looks for rates and replicas, `tuning` for options.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import NamedTuple

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.arguments import (
    CONFIG_HELP,
    DEFAULT_SEEDS,
    add_common,
    add_jobs,
    add_output,
    add_price,
    add_workload,
    read_card,
    read_cards,
    read_jobs,
    read_num_seeds,
    read_source,
    read_workloads,
    running,
)
from aioserve.lab.comparison.candidates import Candidate, in_fleet, load_candidates, machines
from aioserve.lab.comparison.document import classes_of, encode
from aioserve.lab.comparison.knee import Bound, Knee, Need, Probe, Target, fewest_replicas, search
from aioserve.lab.comparison.measures import NOISE, TINY, UNKNOWN, Row, number, parse_measure
from aioserve.lab.comparison.report import html_table, static_page
from aioserve.lab.simulation.run import Progress
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.terminal import in_columns, paint
from aioserve.lab.tuning import (
    DEFAULT,
    RATE,
    Score,
    Split,
    Tuning,
    check_values,
    grid,
    score_by_measure,
    score_by_rate,
    split,
    tune,
    two_workloads,
)
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload
from aioserve.support.arguments import Parser, count
from aioserve.support.files import write


def run_search(words: Sequence[str]) -> int:
    """`aioserve search`; returns the exit code. Raises `AioserveError`."""
    arguments = _parser().parse_args(words)
    for name in ("goodput", "tolerance"):
        if not 0 < getattr(arguments, name) <= 1:
            raise ConfigError(f"--{name} must be above 0 and at most 1")
    if arguments.replicas is not None:
        return _find_replicas(arguments)
    for name in ("fleet", "routers", "price_per_hour"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for --replicas: give it as well")
    if len(arguments.configs) > 1:
        raise ConfigError("several configurations are searched with --replicas only: give one")
    (arguments.config,) = arguments.configs
    arguments.card_settings = read_card(arguments)
    if check_values(arguments.set):
        return _tune(arguments)
    for name in ("by", "held_out", "train_share", "jobs"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for a search over values, such as --set "
                "scheduler.options.chunk_size=64,128,256"
            )
    return _find_rate(arguments)


def _find_rate(arguments: argparse.Namespace) -> int:
    (candidate,) = load_candidates([arguments.config], [*arguments.card_settings, *arguments.set])
    workloads = read_workloads(arguments, 1)
    has_slo = _has_slo(arguments, workloads)
    heads = [f"{b.measure} {b.statistic}, ms" for b in arguments.bound]
    heads = [*(["within the SLO"] if has_slo else []), *heads]
    print(f"{'requests/s':>12}  {'time scale':>12}" + "".join(f"  {head:>14}" for head in heads))

    def show(probe: Probe) -> None:
        print(paint(render_probe(probe)), flush=True)

    with running(None) as report:
        knee = _knee(arguments, report, candidate, workloads, show)
    words = render_knee(candidate, knee, arguments.bound, has_slo=has_slo)
    print(words)
    write(arguments.json, encode(msgspec.to_builtins(knee)))
    if arguments.html:
        write(arguments.html, knee_page(knee, arguments.bound, words).encode())
    return 0


def _find_replicas(arguments: argparse.Namespace) -> int:
    """Print the fewest replicas of each configuration on each card, and what a day costs."""
    from aioserve.lab.simulation.fleet_plan import FleetSpec

    if check_values(arguments.set):
        raise ConfigError("--replicas tries numbers of replicas: give --set one value each")
    for name in ("by", "held_out", "train_share", "jobs"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} plays no part beside --replicas")
    routers = None if arguments.routers is None else tuple(arguments.routers)
    spec = FleetSpec.load(arguments.fleet or "1", routers, arguments.price_per_hour)
    if spec.autoscaling is not None or len(spec.routers) > 1:
        raise ConfigError("--replicas takes a fleet with one router and without autoscaling")
    workloads = read_workloads(arguments, 1)
    _has_slo(arguments, workloads)
    cards = read_cards(arguments)
    candidates = [
        msgspec.structs.replace(candidate, name=" ".join(filter(None, [candidate.name, card])))
        for card, own in cards
        for candidate in in_fleet(load_candidates(arguments.configs, [*own, *arguments.set]), spec)
    ]
    for line in machines(candidates):
        print(line)
    needs: list[Need] = []
    with running(None) as report:
        for candidate in candidates:
            need = fewest_replicas(
                candidate,
                workloads,
                ServiceLevels.of(arguments.slo, classes_of(workloads)),
                arguments.replicas,
                bounds=arguments.bound,
                target=Target(arguments.goodput, arguments.each_class),
                clip=arguments.clip,
                progress=report,
            )
            needs.append(need)
    print(render_needs(needs, arguments.replicas))
    write(arguments.json, encode(msgspec.to_builtins(needs)))
    if arguments.html:
        words = "\n".join(machines(candidates))
        write(arguments.html, needs_page(needs, arguments.replicas, words).encode())
    return 0


def render_needs(needs: Sequence["Need"], most: int) -> str:
    """Return a table: of each candidate the fewest replicas, the share within the SLO with them and
    with the next fewer that were tried, and what a day costs.
    """
    rows = [("", "replicas", "within the SLO", "with fewer", "price a day", "kWh a day")]
    for need in needs:
        tried = {attempt.replicas: attempt for attempt in need.attempts}
        last = max(tried) if need.replicas is None else need.replicas
        fewer = max((n for n in tried if n < last), default=None)
        rows.append(
            (
                need.name,
                f"over {most}" if need.replicas is None else str(need.replicas),
                _share(tried[last].good_share),
                "" if fewer is None else f"{_share(tried[fewer].good_share)} ({fewer})",
                "" if need.price_per_day is None else f"{need.price_per_day:,.2f}",
                "" if need.kwh_per_day is None else f"{need.kwh_per_day:,.1f}",
            )
        )
    return "\n".join(in_columns(rows))


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def _tune(arguments: argparse.Namespace) -> int:
    """Choose among values on a training part, and judge the choice on a held-out part."""
    row = RATE if arguments.by is None else parse_measure(arguments.by)
    _refuse_idle(arguments)
    candidates = grid(arguments.config, arguments.set, arguments.card_settings)
    parts = _parts(arguments)
    with running(None) as report:
        if row is RATE:
            _has_slo(arguments, parts.training)
            score: Score = partial(score_by_rate, partial(_knee, arguments, report))
        else:
            score = partial(
                score_by_measure,
                row,
                slo=arguments.slo,
                num_jobs=read_jobs(arguments, parts.training, len(candidates)),
                progress=report,
                clip=arguments.clip,
            )
        tuning = tune(candidates, parts, score)
    print(paint(render_tuning(tuning, row)))
    write(arguments.json, encode(msgspec.to_builtins(tuning)))
    if arguments.html:
        words = "\n".join([f"{tuning.parts}.", *_judged(tuning, row)])
        write(arguments.html, tuning_page(tuning, row, words).encode())
    return 0


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` for an argument that would do nothing beside the others."""
    if arguments.by is None:
        if arguments.jobs is not None:
            raise ConfigError("--jobs is for --by: one rate is tried after the other")
    elif arguments.bound or arguments.each_class:
        raise ConfigError("--bound and --each-class say which rate is too high; --by asks for none")


def _parts(arguments: argparse.Namespace) -> Split:
    """Return what trains and what is held out."""
    source, share = read_source(arguments), arguments.train_share
    seeds = _seeds(arguments, source)
    if share is not None and (arguments.held_out is not None or not source.is_trace):
        raise ConfigError("--train-share cuts a trace in two, and nothing else")
    if arguments.held_out is not None:
        other = msgspec.structs.replace(source, path=arguments.held_out)
        return two_workloads(source, seeds, other, _seeds(arguments, other))
    if share is not None and not 0 < share < 1:
        raise ConfigError(f"--train-share must be above 0 and below 1, got {share:g}")
    return split(source, seeds, share or 0.5)


def _seeds(arguments: argparse.Namespace, source: WorkloadSource) -> range:
    count = read_num_seeds(arguments, DEFAULT_SEEDS, is_trace=source.is_trace)
    return range(arguments.seed, arguments.seed + count)


def _has_slo(arguments: argparse.Namespace, workloads: Sequence[Workload]) -> bool:
    """Return whether there is an SLO. Raises `ConfigError` if there are no bounds either."""
    has_slo = ServiceLevels.of(arguments.slo, classes_of(workloads)) is not None
    if not has_slo and not arguments.bound:
        raise ConfigError(
            "search needs --slo, for example --slo ttft=0.5,tpot=0.05, or --bound gap:p99=0.2; "
            "over values of settings, --by e2e:mean instead"
        )
    return has_slo


def _knee(
    arguments: argparse.Namespace,
    progress: Progress,
    candidate: Candidate,
    workloads: Sequence[Workload],
    on_probe: Callable[[Probe], None] = lambda probe: None,
) -> Knee:
    return search(
        candidate,
        workloads,
        ServiceLevels.of(arguments.slo, classes_of(workloads)),
        bounds=arguments.bound,
        target=arguments.goodput,
        each_class=arguments.each_class,
        tolerance=arguments.tolerance,
        clip=arguments.clip,
        progress=progress,
        on_probe=on_probe,
    )


def _parser() -> Parser:
    parser = Parser(
        "search",
        description="Find the highest rate at which a configuration meets its SLO. With several "
        "values of settings, choose the best of them on a training part of the workload, and say "
        "what they are worth on requests that are held out. With --replicas, find how many "
        "replicas the workload needs under each configuration, and what a day of them costs.",
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help=CONFIG_HELP)
    add_workload(parser)
    add_common(
        parser,
        seeds=1,
        has_one_card=False,
        set_help="set any setting; one with several values separated by commas, such as "
        "scheduler.options.chunk_size=64,128,256, is searched; several such: all combinations",
    )
    parser.add_argument(
        "--goodput",
        type=float,
        default=0.99,
        metavar="SHARE",
        help="share of requests that must be within the SLO",
    )
    parser.add_argument(
        "--bound",
        action="append",
        default=[],
        type=Bound.parse,
        metavar="MEASURE:STATISTIC=S",
        help="what a statistic over all requests, or gaps, may be at most, in seconds or ms, such "
        "as gap:p99=200ms and ttft:p50=2; repeatable, and instead of --slo or beside it",
    )
    parser.add_argument(
        "--each-class",
        action="store_true",
        help="each class with an SLO must reach that share alone, not only all requests together",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="relative precision of the rate found",
    )
    add_output(parser, "--html", help="write a report with a chart to this HTML file")
    _add_replicas(parser)
    _add_tuning(parser)
    return parser


def _add_replicas(parser: Parser) -> None:
    group = parser.add_argument_group("search for the fewest replicas")
    group.add_argument(
        "--replicas",
        type=count,
        metavar="MOST",
        help="find how many replicas the workload needs within its SLO, up to MOST, under each of "
        "several configurations and on each --card",
    )
    group.add_argument(
        "--fleet",
        metavar="FILE",
        help="fleet file that is multiplied, such as two of one card beside three of another "
        "(default: one replica)",
    )
    group.add_argument("--routers", nargs=1, metavar="NAME", help="router (default: least_work)")
    add_price(group, reports="the price of a day")


def _add_tuning(parser: Parser) -> None:
    group = parser.add_argument_group("search over values of settings")
    group.add_argument(
        "--by",
        metavar="NAME",
        help="what decides, at the workload's rate: e2e:mean, gap:p99, good_share and others "
        "(default: the highest rate within the SLO)",
    )
    group.add_argument(
        "--held-out",
        metavar="FILE",
        help="workload that judges what was chosen (default: the later part of a trace, or as many "
        f"other seeds of a description, {DEFAULT_SEEDS})",
    )
    group.add_argument(
        "--train-share",
        type=float,
        metavar="SHARE",
        help="share of a trace's time that trains (default: 0.5)",
    )
    add_jobs(group)


# What was found, in words.


#: By the verdict on the held-out part: what is said of the gain.
HOLDS = {
    "better": "The gain holds.",
    "worse": "The gain does not hold: the default is better there.",
    NOISE: "Whether the gain holds cannot be told from noise.",
    TINY: "Hardly any gain is left: less than 1%.",
    UNKNOWN: "Whether the gain holds is open: there is no interval from so little. Take several "
    "seeds, or a longer trace.",
    "the same": "There is no gain: the two do the same there.",
}


def render_probe(probe: Probe) -> str:
    """Return a rate that was tried, in a line."""
    mark = "" if probe.is_met else "  too fast"
    shown = [] if probe.good_share is None else [f"{100 * probe.good_share:.2f}%"]
    shown += [f"{1e3 * value:.1f}" for value in probe.bounded.values()]
    if probe.worst_class is not None:
        mark = f"  {probe.worst_class} {100 * (probe.worst_class_share or 0):.2f}%{mark}"
    values = "".join(f"  {value:>14}" for value in shown)
    return f"{probe.rate:12.3f}  {probe.time_scale:12.4f}{values}{mark}"


def render_knee(candidate: Candidate, knee: Knee, bounds: Sequence[Bound], *, has_slo: bool) -> str:
    """Return the highest rate, in a sentence."""
    if knee.rate is None or knee.rate_above is None:
        return f"{candidate.name}: no knee found: {knee.note}"
    whom = "each class" if knee.each_class else "the requests"
    does = [f"meets the SLO for {100 * knee.target:g}% of {whom}"] if has_slo else []
    does += [f"keeps {b.measure} {b.statistic} within {b.limit:g} s" for b in bounds]
    return (
        f"{candidate.name} {' and '.join(does)} up to {knee.rate:.3g} requests/s, and not at "
        f"{knee.rate_above:.3g}"
    )


def render_tuning(tuning: Tuning, row: Row) -> str:
    """Return the scores of all candidates, what was chosen, and what is left of its gain."""
    better = "more" if row.good > 0 else "less"
    width = max(len(name) for name in (*tuning.candidates, "candidate"))
    lines = [f"{tuning.parts}.", f"{row.label}: {better} is better.", ""]
    lines.append(f"{'':{width}}  {'training':>12}  {'held out':>12}")
    held_out = {DEFAULT: tuning.held_out_default, tuning.chosen: tuning.held_out}
    for name, value in zip(tuning.candidates, tuning.training, strict=True):
        shown = number(held_out[name], row) if name in held_out else ""
        mark = "  chosen" if name == tuning.chosen else ""
        lines.append(f"{name:{width}}  {number(value, row):>12}  {shown:>12}{mark}".rstrip())
    return "\n".join([*lines, "", *_judged(tuning, row)])


def _judged(tuning: Tuning, row: Row) -> list[str]:
    count = len(tuning.candidates)
    if tuning.chosen == DEFAULT:
        return [f"The default is the best of {count} in training: there is nothing to gain."]
    trained, held_out = tuning.gain_in_training, tuning.gain
    lines = [
        f"{tuning.chosen} is the best of {count} in training, by "
        f"{trained.in_words(row)} against the default. That is biased in its favour: it was "
        "chosen for it.",
        f"Held out it has {number(tuning.held_out, row)}, the default "
        f"{number(tuning.held_out_default, row)}: {held_out.in_words(row)}. "
        f"{HOLDS[held_out.verdict]}",
    ]
    if trained.value and held_out.verdict not in (NOISE, UNKNOWN):
        lines.append(
            f"Of the gain in training {100 * held_out.value / trained.value:.0f}% is left."
        )
    return lines


# What was found as one HTML file: a chart, the words of the terminal, and a table.


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
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f"<p>{escape(text)}</p>" for text in words.splitlines() if text.strip()]
    parts += [f'<div class="panel">{chart}</div>', f"<p>{escape(caption)}</p>"]
    parts.append(html_table(heads, (map(escape, row) for row in cells)))
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
