"""The command `mispredict`: arguments in, curves over the error of predictions out.

Knows nothing about numbers.
"""

from collections.abc import Sequence

import msgspec

from aioserve.arguments import Parser
from aioserve.lab.arguments import add_output
from aioserve.lab.comparison.arguments import (
    CONFIG_HELP,
    add_common,
    add_jobs,
    add_workload,
    read_jobs,
    read_workloads,
    running,
)
from aioserve.lab.comparison.candidates import load_candidates
from aioserve.lab.comparison.document import encode
from aioserve.lab.comparison.rows import parse_measure
from aioserve.lab.mispredict.chart import draw
from aioserve.lab.mispredict.curves import measure_curves
from aioserve.lab.mispredict.errors import DEFAULT, Errors
from aioserve.lab.mispredict.page import render_page
from aioserve.lab.mispredict.words import render
from aioserve.lab.terminal import paint
from aioserve.output_file import write


def run_mispredict(words: Sequence[str]) -> int:
    """`aioserve mispredict`; returns the exit code. Raises `AioserveError`."""
    arguments = _parser().parse_args(words)
    row = parse_measure(arguments.measure)
    baseline, *candidates = load_candidates([arguments.against, *arguments.configs], arguments.set)
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
    write(arguments.json, encode(msgspec.to_builtins(curves)))
    if arguments.svg:
        write(arguments.svg, draw(curves).encode())
    if arguments.html:
        write(arguments.html, render_page(curves).encode())
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
