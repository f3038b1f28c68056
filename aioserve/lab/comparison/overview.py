"""One line for each configuration of a fleet, so that many routers and policies fit on a screen.

Knows the document that `compare` makes. Judges by the intervals that stand in it.
"""

import math
from typing import Any

from aioserve.lab.comparison.document import Document
from aioserve.lab.comparison.rows import ROWS, Row, difference_of, number, value_of, verdict

COLUMNS = (
    ("ttft", "p50"),
    ("ttft", "p99"),
    ("gap", "p99"),
    ("e2e", "p50"),
    ("e2e", "p99"),
    ("totals", "output_tokens_per_second"),
    ("totals", "good_share"),
    ("totals", "worst_class_share"),
    ("totals", "prefix_hit_share"),
    ("totals", "busy_share"),
    ("totals", "replicas"),
    ("totals", "busiest_to_mean"),
    ("totals", "unfinished"),
    ("totals", "resent"),
    ("totals", "moved"),
    ("totals", "price_per_million_output"),
)
MARKS = {"better": "+", "worse": "-"}
LEAST = 3  # configurations, below which the tables of pairs say the same


def overview(document: Document) -> list[str]:
    """Lines of a table of all configurations; none where it is no fleet, or there are few."""
    results = document["results"]
    if len(results) < LEAST or results[0]["fleet"] is None:
        return []
    table = overview_table(document)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        f"{name:{widths[0]}}"
        + "".join(f"  {word:>{width}}" for word, width in zip(words, widths[1:], strict=True))
        for name, *words in table
    ]
    first = results[0]["name"]
    return [
        *(line.rstrip() for line in lines),
        f"Times in ms. + better and - worse than {first} by the 95% interval of the difference.",
        "",
    ]


def overview_table(document: Document) -> list[list[str]]:
    """The same as cells, with a line of labels."""
    results = document["results"]
    by_name = {(row.measure, row.statistic): row for row in ROWS}
    rows = [by_name[column] for column in COLUMNS]
    rows = [row for row in rows if any(_is_told(result, row) for result in results)]
    head = ["", *(row.label.split(",")[0].replace("end to end", "e2e") + " " for row in rows)]
    return [head] + [
        [result["name"], *(_cell(results[0], result, row) for row in rows)] for result in results
    ]


def _is_told(result: dict[str, Any], row: Row) -> bool:
    value = value_of(result, row)
    is_rare = row.statistic in ("resent", "moved", "unfinished")
    return not math.isnan(value) and (value != 0 or not is_rare)


def _cell(first: dict[str, Any], result: dict[str, Any], row: Row) -> str:
    difference = difference_of(result, row) if result is not first else None
    said = "" if difference is None else verdict(difference, row, value_of(first, row))
    return number(value_of(result, row), row) + MARKS.get(said, " ")
