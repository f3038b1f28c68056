"""The command `sweep`: a configuration with several values of one setting, or over load.

Arguments in, words and files out. The runs are those of `compare`.
"""

import math
from collections.abc import Sequence
from typing import Any

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
    read_workloads,
)
from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.commands import add_quality_and_jobs, compare_all, write_reports
from aioserve.lab.comparison.document import Document
from aioserve.lab.comparison.load_curves import add_load, sweep_load
from aioserve.lab.comparison.measures import (
    EQUAL,
    ROWS,
    UNKNOWN,
    Row,
    difference_of,
    number,
    span,
    value_of,
)
from aioserve.lab.comparison.words import headline, remarks
from aioserve.lab.terminal import in_columns, paint
from aioserve.support.arguments import Parser


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
    by_name = {(row.measure, row.statistic): row for row in ROWS}
    rows = [by_name[column] for column in SWEEP_COLUMNS]
    rows = [r for r in rows if any(not math.isnan(value_of(result, r)) for result in results)]
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
