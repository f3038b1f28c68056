"""The command `search`: arguments in, the rate that was found, or the options, in words.

Knows nothing about numbers.
"""

from collections.abc import Sequence

import msgspec

from aioserve.arguments import Parser
from aioserve.errors import ConfigError
from aioserve.lab.comparison.arguments import (
    CONFIG_HELP,
    add_common,
    add_workload,
    read_workloads,
    running,
)
from aioserve.lab.comparison.candidates import Candidate, load_candidates
from aioserve.lab.comparison.document import classes_of, encode
from aioserve.lab.comparison.knee import Bound, Knee, Probe, search
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.terminal import paint
from aioserve.output_file import write


def run_search(words: Sequence[str]) -> int:
    """`aioserve search`; returns the exit code. Raises `AioserveError`."""
    parser = Parser(
        "search", description="Find the highest rate at which a configuration meets its SLO."
    )
    parser.add_argument("config", metavar="CONFIG", help=CONFIG_HELP)
    add_workload(parser)
    add_common(parser, seeds=1)
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
        help="what a statistic over all requests, or gaps, may be at most, in seconds, such as "
        "gap:p99=0.2 and ttft:p50=2; repeatable, and instead of --slo or beside it",
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
    arguments = parser.parse_args(words)
    for name in ("goodput", "tolerance"):
        if not 0 < getattr(arguments, name) <= 1:
            raise ConfigError(f"--{name} must be above 0 and at most 1")
    (candidate,) = load_candidates([arguments.config], arguments.set)
    workloads = read_workloads(arguments, 1)
    levels = ServiceLevels.of(arguments.slo, classes_of(workloads))
    if levels is None and not arguments.bound:
        raise ConfigError(
            "search needs --slo, for example --slo ttft=0.5,tpot=0.05, or --bound gap:p99=0.2"
        )
    heads = [f"{b.measure} {b.statistic}, ms" for b in arguments.bound]
    heads = [*(["within the SLO"] if levels is not None else []), *heads]
    print(f"{'requests/s':>12}  {'time scale':>12}" + "".join(f"  {head:>14}" for head in heads))
    with running(None) as report:
        knee = search(
            candidate,
            workloads,
            levels,
            bounds=arguments.bound,
            target=arguments.goodput,
            each_class=arguments.each_class,
            tolerance=arguments.tolerance,
            clip=arguments.clip,
            progress=report,
            on_probe=_print_probe,
        )
    print(_knee_in_words(candidate, knee, arguments.bound, has_slo=levels is not None))
    write(arguments.json, encode(msgspec.to_builtins(knee)))
    return 0


def _print_probe(probe: Probe) -> None:
    mark = "" if probe.is_met else "  too fast"
    shown = [] if probe.good_share is None else [f"{100 * probe.good_share:.2f}%"]
    shown += [f"{1e3 * value:.1f}" for value in probe.bounded.values()]
    if probe.worst_class is not None:
        mark = f"  {probe.worst_class} {100 * (probe.worst_class_share or 0):.2f}%{mark}"
    values = "".join(f"  {value:>14}" for value in shown)
    row = f"{probe.rate:12.3f}  {probe.time_scale:12.4f}{values}{mark}"
    print(paint(row), flush=True)


def _knee_in_words(
    candidate: Candidate, knee: Knee, bounds: Sequence[Bound], *, has_slo: bool
) -> str:
    if knee.rate is None or knee.rate_above is None:
        return f"{candidate.name}: no knee found: {knee.note}"
    whom = "each class" if knee.each_class else "the requests"
    does = [f"meets the SLO for {100 * knee.target:g}% of {whom}"] if has_slo else []
    does += [f"keeps {b.measure} {b.statistic} within {b.limit:g} s" for b in bounds]
    return (
        f"{candidate.name} {' and '.join(does)} up to {knee.rate:.3g} requests/s, and not at "
        f"{knee.rate_above:.3g}"
    )
