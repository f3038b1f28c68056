"""Arguments that several commands of the lab have: declared once, so that they mean the same.

Knows argparse and what the arguments are for. Knows no command.
"""

import argparse
import sys

from aioserve.arguments import TakesArguments, assignment, output_file, positive
from aioserve.lab.slo import Slo


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
    """Add the argument `--slo`, an `Slo`."""
    parser.add_argument(
        "--slo",
        type=Slo.parse,
        metavar="LIMITS",
        help="latency limits in seconds that goodput counts against: ttft=0.5,tpot=0.05,e2e=10",
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
    """Whether the last line of stdout is JSON: asked for, or read by a program."""
    return bool(arguments.json) or not sys.stdout.isatty()


def add_output(
    parser: argparse.ArgumentParser, *flags: str, help: str, metavar: str = "FILE"
) -> None:
    """Add an argument that names a file, written when the work is done."""
    parser.add_argument(*flags, metavar=metavar, type=output_file, help=help)
