"""The measures of a comparison: which there are, in which units, what they mean, which is better.

Knows the document that `compare` makes; computes nothing but units.
"""

import math
from typing import Any, NamedTuple

from aioserve.errors import ConfigError
from aioserve.lab.legend import DURATIONS
from aioserve.nearest import did_you_mean

NOISE = "not distinguishable from noise"
UNKNOWN = "no interval from so little"
TINY = "less than 1% apart"


class Row(NamedTuple):
    """One line of a table: a measure, and how to show it."""

    label: str
    measure: str
    statistic: str
    unit: str  # appended to differences in words
    factor: float  # from the document's unit to the shown one
    digits: int
    good: int  # +1: more is better, -1: less is, 0: neither


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
    *(Row(f"program {s}, s", "program", s, "s", 1, 2, -1) for s in ("mean", "p50", "p99")),
    Row("slowdown mean", "slowdown", "mean", "", 1, 2, -1),
    Row("slowdown p99", "slowdown", "p99", "", 1, 2, -1),
    Row("programs in time, %", "totals", "programs_in_time", "points", 100, 1, 1),
    Row("output tokens/s", "totals", "output_tokens_per_second", "tokens/s", 1, 1, 1),
    Row("all tokens/s", "totals", "total_tokens_per_second", "tokens/s", 1, 0, 1),
    Row("goodput, requests/s", "totals", "goodput_per_second", "requests/s", 1, 2, 1),
    Row("within the SLO, %", "totals", "good_share", "points", 100, 1, 1),
    Row("worst class, %", "totals", "worst_class_share", "points", 100, 1, 1),
    Row("QoE mean", "totals", "quality", "", 1, 3, 1),
    Row("QoE p10", "totals", "quality_p10", "", 1, 3, 1),
    Row("service apart max", "totals", "service_difference", "", 1, 0, -1),
    Row("service apart mean", "totals", "service_difference_mean", "", 1, 0, -1),
    Row("prefix hits, %", "totals", "prefix_hit_share", "points", 100, 1, 1),
    Row("wasted tokens, %", "totals", "wasted_share", "points", 100, 2, -1),
    Row("draft tokens", "totals", "draft_tokens", "", 1, 0, 0),
    Row("right drafts, %", "totals", "right_draft_share", "points", 100, 1, 1),
    Row("preemptions", "totals", "preemptions", "", 1, 1, -1),
    Row("unfinished requests", "totals", "unfinished", "", 1, 1, -1),
    Row("busy, %", "totals", "busy_share", "points", 100, 1, 0),
    Row("replicas", "totals", "replicas", "", 1, 2, -1),
    Row("busiest to mean", "totals", "busiest_to_mean", "", 1, 2, -1),
    Row("sent again", "totals", "resent", "", 1, 1, -1),
    Row("moved", "totals", "moved", "", 1, 0, 0),
    Row("price, 1M output", "totals", "price_per_million_output", "", 1, 3, -1),
    Row("price, 1M tokens", "totals", "price_per_million_total", "", 1, 3, -1),
]


# By what labels begin with. One sentence each, for a reader who has not met them.
MEANINGS = {
    **DURATIONS,
    "output tokens/s": "Tokens of replies per second, from the first arrival to the last token.",
    "all tokens/s": "The same with the tokens of prompts.",
    "goodput": "Requests per second that finished within all limits of the SLO.",
    "within the SLO": "The share of the requests with an SLO that kept to all of its limits.",
    "program": (
        "From the first arrival of a program of several requests, pauses of tools included, to its "
        "last token, of those that got there."
    ),
    "slowdown": "That time over the program's own when it runs alone on an empty engine.",
    "programs in time": "The share of the programs that completed within their SLO's `program`.",
    "worst class": "The share within the SLO of the class of which it is the lowest.",
    "QoE": (
        "Quality of experience (Andes): 1 if every token is there when its reader comes to it, "
        "less the area that late tokens take from the curve of what was to be read."
    ),
    "service apart": (
        "Fairness as VTC has it: how differently two clients were served while both had requests "
        "waiting (1 for a token of a prompt, 2 for one of a reply, divided by weights)."
    ),
    "prefix hits": "The share of prompt tokens that were found in the KV cache.",
    "wasted tokens": (
        "Computed again after a preemption, for requests that never finished, or as wrong drafts: "
        "as a share of all that was computed."
    ),
    "draft tokens": "Guessed tokens that were computed to be verified.",
    "right drafts": "The share of them that was right, and so was kept.",
    "preemptions": "How often a running request had to give its memory back.",
    "unfinished requests": "Ended before their last token: timed out, refused, failed.",
    "busy": "The share of the time in which steps ran, over all replicas of the fleet.",
    "replicas": "Replicas that were paid for, on average; one that starts is paid for.",
    "busiest to mean": "The time in which steps ran at the busiest replica, over the mean of all.",
    "sent again": "Requests whose replica died before it had streamed anything of the reply.",
    "price": (
        "What the fleet costs in the time of the run, at the price that was stated, over the "
        "millions of tokens of replies, or of prompts and replies."
    ),
    "p50, p99": "The value that 50%, or 99%, of the requests (or gaps) do not exceed.",
}


def key(row: Row) -> str:
    """The name of a row's measure on the command line and in files: `ttft:p99`, `good_share`."""
    return row.statistic if row.measure == "totals" else f"{row.measure}:{row.statistic}"


def parse_measure(text: str) -> Row:
    """The row that `e2e:mean` or `good_share` names, of those of which more or less is better.
    Raises `ConfigError` that lists them.
    """
    found = {key(row): row for row in ROWS if row.good and row.measure != "slowdown"}
    found = {name: row for name, row in found.items() if row.statistic != "max"}
    if text not in found:
        raise ConfigError(
            f"unknown measure {text!r}{did_you_mean(text, found)}; there are {', '.join(found)}"
        )
    return found[text]


def meanings(rows: list[Row]) -> dict[str, str]:
    """The meanings of rows, and of the words in their labels."""
    labels = [row.label for row in rows] + ["p50, p99"]
    return {
        word: meaning
        for word, meaning in MEANINGS.items()
        if any(label.startswith(word) for label in labels)
    }


def value_of(result: dict[str, Any], row: Row) -> float:
    """The value of a row under one configuration, in the row's unit; NaN if there is none."""
    section = (
        result["totals"] if row.measure == "totals" else result["durations"].get(row.measure, {})
    )
    value = section.get(row.statistic)  # without an SLO there is no goodput
    return math.nan if value is None else value * row.factor


def verdict(difference: dict[str, Any] | None, row: Row, first: float) -> str:
    """A difference against the value `first` in words: better, worse, or neither."""
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
    if row.good == 0:
        return "higher" if difference["value"] > 0 else "lower"
    return "better" if difference["value"] * row.good > 0 else "worse"


def shown_rows(results: list[dict[str, Any]]) -> list[Row]:
    """Rows that say something: some value is known and not 0."""
    return [
        row
        for row in ROWS
        if any(value_of(r, row) != 0 and not math.isnan(value_of(r, row)) for r in results)
    ]


def difference_of(result: dict[str, Any], row: Row) -> dict[str, Any] | None:
    """The difference against the first configuration; None for the first, and for maxima."""
    if "against_first" not in result:
        return None
    found = result["against_first"]["differences"].get(row.measure, {}).get(row.statistic)
    return found if found is None or found["value"] is not None else None


def number(value: float, row: Row) -> str:
    """A value with the digits of the row."""
    return "-" if math.isnan(value) else f"{value:.{row.digits}f}"


def signed(value: float, row: Row) -> str:
    """A difference: with its sign, unless it rounds to nothing."""
    text = f"{value:+.{row.digits}f}"
    return text if float(text) else text[1:]
