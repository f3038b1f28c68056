"""Arguments that several commands of the lab have: declared once, so that they mean the same.

Knows argparse and what the arguments are for. Knows no command.
"""

import argparse
import sys

from aioserve.lab.slo import StatedSlo
from aioserve.support.arguments import TakesArguments, assignment, output_file, positive


def add_settings(
    parser: argparse.ArgumentParser, help: str = "set any setting of serve; repeatable"
) -> None:
    """Add the argument `--set`, a list of (dotted name, value)."""
    parser.add_argument(
        "--set",
        metavar="SECTION.NAME=VALUE",
        action="append",
        default=[],
        type=assignment,
        help=help,
    )


def add_slo(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--slo`, a list of `StatedSlo`."""
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        type=StatedSlo.parse,
        metavar="[CLASS:]LIMITS",
        help="limits that goodput counts against, for all requests or one class of the workload; "
        "repeatable: chat:ttft=0.5,gap=0.2 batch:e2e=60. Seconds of ttft, tpot, e2e, gap (the "
        "largest between two tokens of a request); deadline: the request's own timeout is kept",
    )


def add_time_scale(group: TakesArguments) -> None:
    """Add the argument `--time-scale`, a number above 0."""
    group.add_argument(
        "--time-scale",
        type=positive,
        default=1.0,
        metavar="X",
        help="factor on the times between arrivals; 0.5: twice the request rate",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--json`, which `wants_json` reads."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the numbers as JSON too, in the last line (the default without a terminal)",
    )


def wants_json(arguments: argparse.Namespace) -> bool:
    """Return whether the last line of stdout is JSON: asked for, or read by a program."""
    return bool(arguments.json) or not sys.stdout.isatty()


def add_output(
    parser: argparse.ArgumentParser, *flags: str, help: str, metavar: str = "FILE"
) -> None:
    """Add an argument that names a file, written when the work is done."""
    parser.add_argument(*flags, metavar=metavar, type=output_file, help=help)


# Arguments that commands on a workload share: which requests, how many seeds, which settings. Knows
# argparse, and makes workloads of what was given. Runs nothing.
