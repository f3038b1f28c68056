"""A comparison in words and in a table for a terminal.

Knows the document that `compare` makes; computes nothing but units.
"""

import math
from typing import Any, NamedTuple

from aioserve.lab.compare import Document

NOISE = "not distinguishable from noise"
UNKNOWN = "no interval from so few seeds"
TINY = "less than 1% apart"


class Row(NamedTuple):
    """One line of a table: a measure, and how to show it."""

    label: str
    measure: str
    statistic: str
    unit: str  # appended to differences in words
    factor: float  # from the document's unit to the shown one
    digits: int
    good: int  # +1: more is better, -1: less is


def _durations() -> list[Row]:
    rows = []
    for label, measure, statistics in (
        ("TTFT", "ttft", ("mean", "p50", "p99")),
        ("TPOT", "tpot", ("mean", "p50", "p99")),
        ("gap", "gap", ("p50", "p99", "max")),
        ("end to end", "e2e", ("mean", "p50", "p99")),
    ):
        rows += [Row(f"{label} {s}, ms", measure, s, "ms", 1e3, 1, -1) for s in statistics]
    return rows


ROWS = [
    *_durations(),
    Row("output tokens/s", "totals", "output_tokens_per_second", "tokens/s", 1, 1, 1),
    Row("all tokens/s", "totals", "total_tokens_per_second", "tokens/s", 1, 0, 1),
    Row("goodput, requests/s", "totals", "goodput_per_second", "requests/s", 1, 2, 1),
    Row("within the SLO, %", "totals", "good_share", "points", 100, 1, 1),
    Row("fairness (Jain)", "totals", "fairness", "", 1, 3, 1),
    Row("prefix hits, %", "totals", "prefix_hit_share", "points", 100, 1, 1),
    Row("wasted tokens, %", "totals", "wasted_share", "points", 100, 2, -1),
    Row("preemptions", "totals", "preemptions", "", 1, 1, -1),
    Row("unfinished requests", "totals", "unfinished", "", 1, 1, -1),
]


def value_of(result: dict[str, Any], row: Row) -> float:
    """The value of a row under one configuration, in the row's unit; NaN if there is none."""
    section = result["totals"] if row.measure == "totals" else result["durations"][row.measure]
    value = section[row.statistic]
    return math.nan if value is None else value * row.factor


def verdict(difference: dict[str, Any] | None, row: Row, first: float) -> str:
    """What a difference against the value `first` amounts to, in words."""
    if difference is None:
        return ""
    if difference["is_nothing"]:
        return "the same"
    if difference["low"] is None:
        return UNKNOWN
    if not difference["is_distinguishable"]:
        return NOISE
    if max(abs(difference["low"]), abs(difference["high"])) * row.factor < 0.01 * abs(first):
        return TINY
    return "better" if difference["value"] * row.good > 0 else "worse"


def shown_rows(results: list[dict[str, Any]]) -> list[Row]:
    """Rows that say something: some value is known and not 0, and not all users are one."""
    users = {user for result in results for user in result["timelines"]["service"]["users"]}
    return [
        row
        for row in ROWS
        if any(value_of(r, row) != 0 and not math.isnan(value_of(r, row)) for r in results)
        and (row.statistic != "fairness" or len(users) > 1)
    ]


def difference_of(result: dict[str, Any], row: Row) -> dict[str, Any] | None:
    """The difference against the first configuration; None for the first, and for maxima."""
    if "against_first" not in result:
        return None
    found = result["against_first"]["differences"].get(row.measure, {}).get(row.statistic)
    return found if found is None or found["value"] is not None else None


def headline(document: Document) -> str:
    """What was compared."""
    workload, seeds = document["workload"], document["workload"]["seeds"]
    times = "" if len(seeds) == 1 else f" with {len(seeds)} seeds"
    how = "in real time" if document["mode"] == "live" else "in virtual time"
    return (
        f"{workload['name']}: {workload['requests']} requests in {workload['seconds']:.0f} s"
        f"{times}, {how}"
    )


def remarks(document: Document, *, with_differences: bool = True) -> list[str]:
    """Sentences that a reader of the numbers should know."""
    first, *others = document["results"]
    found = list(document["notes"])
    for other in others:
        names = other["against_first"]["other_differences"]
        if names and with_differences:
            found.append(
                f"{first['name']} and {other['name']} differ in more than the policy: "
                f"{', '.join(names)}."
            )
    for result in document["results"]:
        ended = {
            reason: count
            for reason, count in result["finish_reasons"].items()
            if reason not in ("length", "stop")
        }
        if ended:
            text = ", ".join(f"{count} {reason}" for reason, count in ended.items())
            found.append(
                f"Under {result['name']} requests did not finish ({text}); their missing times "
                "are in no mean or quantile."
            )
    if document["workload"]["is_recorded"]:
        found.append("A recorded trace has no other seeds: intervals come from blocks of time.")
    return found


def pair_summary(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The differences that matter, most of them in one sentence each."""
    rows = [row for row in shown_rows([first, other]) if difference_of(other, row)]
    by_verdict: dict[str, list[str]] = {}
    for row in rows:
        difference = difference_of(other, row)
        assert difference is not None
        text, said = row.label.split(",")[0], verdict(difference, row, value_of(first, row))
        if said in ("better", "worse"):
            text += f" ({_change(first, other, row)})"
        by_verdict.setdefault(said, []).append(text)
    order = ("better", "worse", TINY, NOISE, "the same", UNKNOWN)
    found = [f"{v}: {', '.join(by_verdict[v])}" for v in order if v in by_verdict]
    e2e = other["against_first"]["paired"]["e2e"]
    found.append(
        f"of {e2e['pairs']} pairs {e2e['faster']} ended sooner and {e2e['slower']} later by more "
        "than 1%"
    )
    return found


def _change(first: dict[str, Any], other: dict[str, Any], row: Row) -> str:
    a, b = value_of(first, row), value_of(other, row)
    if a <= 0 or row.unit in ("", "points"):
        return f"{b - a:+.{row.digits}f} {row.unit}".strip()
    return f"{b / a:.1f} times" if b > 2 * a else f"{100 * (b / a - 1):+.0f}%"


def render_table(document: Document) -> str:
    """All of it as text of fixed width."""
    first, *others = document["results"]
    lines = [headline(document), ""]
    if not others:
        lines += _single(first)
    for other in others:
        lines += [*_pair(first, other), ""]
    return "\n".join(lines + remarks(document)).rstrip()


def _single(result: dict[str, Any]) -> list[str]:
    rows = shown_rows([result])
    width = max(len(result["name"]), 10)
    return [f"{'':22}{result['name']:>{width}}"] + [
        f"{row.label:22}{_number(value_of(result, row), row):>{width}}" for row in rows
    ]


def _pair(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    a, b = max(len(first["name"]), 9), max(len(other["name"]), 9)
    lines = [
        f"{'':22}{first['name']:>{a}}  {other['name']:>{b}}  {'difference':>10}  "
        f"{'95% interval':>20}"
    ]
    for row in shown_rows([first, other]):
        x, y = value_of(first, row), value_of(other, row)
        difference = difference_of(other, row)
        interval = delta = ""
        if difference is not None:
            delta = f"{difference['value'] * row.factor:+.{row.digits}f}"
            if difference["low"] is not None:
                low, high = (difference[end] * row.factor for end in ("low", "high"))
                interval = f"{low:+.{row.digits}f} .. {high:+.{row.digits}f}"
        lines.append(
            f"{row.label:22}{_number(x, row):>{a}}  {_number(y, row):>{b}}  {delta:>10}  "
            f"{interval:>20}  {verdict(difference, row, x)}".rstrip()
        )
    return lines


def _number(value: float, row: Row) -> str:
    return "-" if math.isnan(value) else f"{value:.{row.digits}f}"


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
)


def render_sweep(document: Document) -> str:
    """One line per value of the setting."""
    results, setting = document["results"], document["sweep"]["setting"]
    by_name = {(row.measure, row.statistic): row for row in ROWS}
    rows = [by_name[column] for column in SWEEP_COLUMNS]
    rows = [r for r in rows if any(not math.isnan(value_of(result, r)) for result in results)]
    heads = [row.label.replace("end to end", "e2e").split(",")[0] for row in rows]
    first = max(len(setting.rpartition(".")[2]), *(len(result["name"]) for result in results))
    widths = [max(len(head), 9) + 2 for head in heads]
    lines = [headline(document), ""]
    lines.append(
        f"{setting.rpartition('.')[2]:>{first}}"
        + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    )
    for result in results:
        lines.append(
            f"{result['name']:>{first}}"
            + "".join(
                f"{_number(value_of(result, row), row):>{width}}"
                for row, width in zip(rows, widths, strict=True)
            )
        )
    lines += ["", "Durations in milliseconds, the SLO in percent of the requests."]
    return "\n".join(lines + remarks(document, with_differences=False))
