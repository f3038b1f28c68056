"""A comparison in words and in tables for a terminal.

Knows the document that `compare` makes; judges by the intervals that stand in it.
"""

import math
from typing import Any, NamedTuple

from aioserve.lab.comparison.bootstrap import MIN_BLOCKS, MIN_SEEDS
from aioserve.lab.comparison.document import Document
from aioserve.lab.comparison.measures import (
    NOISE,
    REQUESTS_PER_BLOCK,
    ROWS,
    TINY,
    UNKNOWN,
    Row,
    difference_of,
    number,
    rows_of,
    shown_rows,
    signed,
    span,
    value_of,
    verdict,
)
from aioserve.lab.terminal import in_columns, legend

MAX_WEIGHTS = 6  # that are named


def headline(document: Document) -> str:
    """Return one line that says what was compared."""
    workload, seeds = document["workload"], document["workload"]["seeds"]
    times = "" if len(seeds) == 1 else f" with {len(seeds)} seeds"
    how = "in real time" if document["mode"] == "live" else "in virtual time"
    if workload["clients"] is not None:
        when = f"from {workload['clients']} clients who wait for each reply"
    elif workload["seconds"]:
        when = f"in {workload['seconds']:.0f} s"
    else:
        when = "at once"
    fleet = document["results"][0]["fleet"]
    where = "" if fleet is None else f" on {fleet['num_replicas']} replicas"
    if fleet is not None and fleet["autoscaling"] is not None:
        least = fleet["autoscaling"]["min_replicas"]
        where = f" on {least} to {fleet['num_replicas']} replicas"
    least, most = workload["max_tokens"]
    limits = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return (
        f"{workload['name']}: {workload['requests']} requests {when}{times}{where}, {how}; "
        f"clients allow {limits} tokens a reply"
    )


def other_differences(document: Document) -> list[str]:
    """Return a sentence for each configuration that differs from the first in more than its
    policy.
    """
    first, *others = document["results"]
    return [
        f"{first['name']} and {other['name']} differ in more than the policy: {', '.join(names)}."
        for other in others
        if (names := other["against_first"]["other_differences"])
    ]


def remarks(document: Document) -> list[str]:
    """Sentences that a reader of the numbers should know."""
    found = list(document["notes"])
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
    if document["workload"]["programs"]:
        found.append(_about_programs(document))
    if len(document["workload"]["seeds"]) < MIN_SEEDS and len(document["results"]) > 1:
        found.append(_about_one_seed(document))
    if document.get("recorded") is not None:
        found.append(_about_recorded(document))
    if has_service(document):
        found.append(_about_service(document))
    return found


def slo_in_words(document: Document) -> str | None:
    """Return the limits that requests must keep to, and under which configuration which class does
    so least.
    """
    if document["slo"] is None:
        return None
    said = f"Good is a request within its SLO: {document['slo']['words']}."
    worst = {result["name"]: result["slo"]["worst_class"] for result in document["results"]}
    if any(worst.values()):
        named = (f"{name or 'no class'} under {config}" for config, name in worst.items())
        said += f" The worst class is {', '.join(named)}."
    return said


def has_service(document: Document) -> bool:
    """Return whether some configuration served clients differently while they waited together."""
    return any(result["totals"]["service_difference"] > 0 for result in document["results"])


def _about_programs(document: Document) -> str:
    count, aborted = document["workload"]["programs"], document["workload"]["aborted_programs"]
    left = f" {aborted} are left by their clients, and have no completion time." if aborted else ""
    how = "" if document["mode"] == "simulated" else " Live, they are not run alone."
    return f"The requests make up {count} programs.{left}{how}"


def _about_one_seed(document: Document) -> str:
    """Return a sentence on what intervals are of, or what a difference needs to have one."""
    is_trace = document["workload"]["is_recorded"]
    missing = MIN_BLOCKS * REQUESTS_PER_BLOCK - document["workload"]["requests"]
    none = "No difference has an interval, and none is called better or worse: "
    if document["mode"] == "live":
        why = "live, the machine is another one in every round"
        return f"{none}{why}. Take at least {MIN_SEEDS} seeds."
    if missing > 0 and is_trace:
        return f"{none}a recorded trace needs {missing} requests more for that."
    found = document["results"][1]["against_first"]["differences"]["e2e"]["mean"]
    if found["low"] is not None:
        return (
            "An interval of one seed is of other draws of the stretches of requests that this one "
            "has, not of other days."
        )
    instead = "Take a longer trace, or one with pauses." if is_trace else "Take several seeds."
    return (
        f"{none}the times of requests depend on those of earlier requests over long stretches, "
        f"and the run has fewer than {MIN_BLOCKS} independent stretches. {instead}"
    )


def _about_recorded(document: Document) -> str:
    """Return how far the simulation of the recorded policy is from what was measured."""
    recorded = document["recorded"]
    said = (
        f"Recorded is what the server measured under {recorded['policies']}; "
        f"{recorded['finished']} of {recorded['requests']} requests had finished by then."
    )
    same = [r for r in document["results"] if r["policy"] == recorded["policies"]]
    if not same:
        return (
            f"{said} How far the simulation is off is told where {recorded['policies']} is one of "
            "the configurations."
        )
    parts = []
    for row in _chosen_by():
        real, simulated = value_of(recorded, row), value_of(same[0], row)
        if real > 0 and not math.isnan(simulated):
            parts.append(f"{row.label.partition(',')[0]} {100 * (simulated / real - 1):+.0f}%")
    return f"{said} Simulated, {same[0]['name']} is off by: {', '.join(parts)}." if parts else said


def _about_service(document: Document) -> str:
    said = "Service counts 1 for a token of a prompt and 2 for a token of a reply"
    if document["weights_stated_by"]:
        said += f", divided by the weights that {_stated_weights(document)}"
    bounds = [result["service_bound"] for result in document["results"]]
    if bounds[0] is not None and not document["weights_stated_by"]:
        said += (
            f"; with this KV cache, VTC keeps waiting clients within {bounds[0]:,.0f} of each other"
        )
    return f"{said}."


def _stated_weights(document: Document) -> str:
    weights = document["results"][0]["weights"]
    named = [f"{client} {weight:g}" for client, weight in list(weights.items())[:MAX_WEIGHTS]]
    if len(weights) > MAX_WEIGHTS:
        named.append(f"and {len(weights) - MAX_WEIGHTS} more")
    if document["weights_stated_by"] == "each configuration":
        named = ["its own"]
    return f"{document['weights_stated_by']} states ({', '.join(named)})"


def on_these_requests(document: Document) -> list[str]:
    """Return a sentence for each configuration after the first on what it changes for the very
    requests of this run: the same requests under both, on a virtual clock, so that no chance is in
    it. Nothing where there are several seeds, whose mean has an interval, or a real clock.
    """
    if document["mode"] == "live" or len(document["workload"]["seeds"]) > 1:
        return []
    first, *others = document["results"]
    found = []
    for other in others:
        rows = [row for row in _chosen_by() if not math.isnan(value_of(other, row))]
        changes = [
            f"{row.label.partition(',')[0]} {_change(first, other, row)}"
            for row in rows
            if value_of(first, row) > 0
        ]
        pairs = other["against_first"]["paired"]["e2e"]
        found.append(
            f"On these {document['workload']['requests']} requests, {other['name']} against "
            f"{first['name']}: {', '.join(changes)}; {pairs['faster']} ended sooner and "
            f"{pairs['slower']} later by more than 1%."
        )
    if found:
        found.append("That is exact in the simulation; an interval is about other requests.")
    return found


def _chosen_by() -> list[Row]:
    """Return the rows by which a policy is usually chosen: means, and the worst hundredth."""
    wanted = [(m, s) for m in ("ttft", "gap", "e2e") for s in ("mean", "p99")]
    return [row for row in ROWS if (row.measure, row.statistic) in wanted]


def pair_summary(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the differences that matter, most of them in one sentence each."""
    rows = [row for row in shown_rows([first, other]) if difference_of(other, row)]
    by_verdict: dict[str, list[str]] = {}
    for row in rows:
        difference = difference_of(other, row)
        assert difference is not None
        text, said = row.label.split(",")[0], verdict(difference, row, value_of(first, row))
        if said in ("better", "worse", "higher", "lower"):
            text += f" ({_change(first, other, row)})"
        by_verdict.setdefault(said, []).append(text)
    order = ("better", "worse", "higher", "lower", TINY, NOISE, "the same", UNKNOWN)
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
    share = 100 * (b / a - 1)
    much = "long" if row.unit in ("ms", "s") else "many"
    if b > 2 * a:
        return f"{b / a:.1f} times as {much}"
    return f"{share:+.{0 if abs(share) >= 1 else 1}f}%"


def render_table(document: Document) -> str:
    """Return the whole comparison as text of fixed width."""
    first, *others = document["results"]
    slo = slo_in_words(document)
    lines = [headline(document), *document["machines"], *([] if slo is None else [slo])]
    lines += other_differences(document)
    lines += [*on_these_requests(document), "", *overview(document)]
    if not others:
        lines += _single(first)
    for number_of, other in enumerate(others):
        lines += [*([""] if number_of else []), *_pair(first, other, document.get("recorded"))]
    lines += render_groups(document)
    lines += ["", legend([row.label for row in shown_rows(document["results"])])]
    return "\n".join([*lines, "", *remarks(document)]).rstrip()


def _single(result: dict[str, Any]) -> list[str]:
    rows = shown_rows([result])
    width = max(len(result["name"]), 10)
    return [f"{'':22}{result['name']:>{width}}"] + [
        f"{row.label:22}{number(value_of(result, row), row):>{width}}" for row in rows
    ]


def _pair(
    first: dict[str, Any], other: dict[str, Any], recorded: dict[str, Any] | None
) -> list[str]:
    a, b = max(len(first["name"]), 9), max(len(other["name"]), 9)
    beside = "" if recorded is None else f"{'recorded':>9}  "
    lines = [
        f"{'':22}{beside}{first['name']:>{a}}  {other['name']:>{b}}  {'difference':>10}  "
        f"{'95% interval':>20}"
    ]
    for row in shown_rows([first, other]):
        x, y = value_of(first, row), value_of(other, row)
        difference = difference_of(other, row)
        interval = delta = ""
        if difference is not None:
            delta = signed(difference["value"] * row.factor, row)
            if difference["low"] is not None:
                low, high = (difference[end] * row.factor for end in ("low", "high"))
                interval = span(low, high, row)
        if recorded is not None:
            beside = f"{number(value_of(recorded, row), row):>9}  "
        lines.append(
            f"{row.label:22}{beside}{number(x, row):>{a}}  {number(y, row):>{b}}  {delta:>10}  "
            f"{interval:>20}  {verdict(difference, row, x)}".rstrip()
        )
    return lines


# A fleet: a line for each configuration, so that many routers and policies fit on a screen.


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
    first = results[0]["name"]
    return [
        *in_columns(overview_table(document)),
        f"Times in ms. + better and - worse than {first} by the 95% interval of the difference.",
        "",
    ]


def overview_table(document: Document) -> list[list[str]]:
    """Return the same as cells, with a line of labels."""
    results = document["results"]
    rows = [row for row in rows_of(COLUMNS) if any(_is_told(result, row) for result in results)]
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


# How clients and classes of clients fared.


GROUP_COLUMNS = [
    Row(f"{label} {statistic}", measure, statistic, "ms", 1e3, 1, -1)
    for label, measure, statistic in (
        ("TTFT", "ttft", "p50"),
        ("TTFT", "ttft", "p99"),
        ("TPOT", "tpot", "p99"),
        ("e2e", "e2e", "p50"),
        ("e2e", "e2e", "p99"),
    )
]
GOOD = Row("SLO, %", "is_good", "mean", "points", 100, 1, 1)
SURE = "*"
COMPETING = (
    "competing: of the time, steps left out a waiting request of this client and one of another; "
    "share: of the tokens that such clients were served then; due: by weight; behind: "
    "the most service by which it fell behind another one then"
)


class Cell(NamedTuple):
    """A value in its column's unit (NaN: unknown), and how it differs from the first one's."""

    value: float
    difference: dict[str, Any] | None
    verdict: str


class GroupRow(NamedTuple):
    """A row of a table: the measures of one group of requests under one configuration."""

    name: str
    config: str
    requests: int
    unfinished: int
    cells: list[Cell]  # of `columns`
    competing: float | None  # share of the time; clients only
    share: float | None  # of what was served while clients competed
    due_share: float | None
    behind: float | None  # service


def columns(document: Document) -> list[Row]:
    """Return the columns of tables of groups: latencies, and the share within the SLO if there is
    one.
    """
    return GROUP_COLUMNS if document["slo"] is None else [*GROUP_COLUMNS, GOOD]


class GroupTable(NamedTuple):
    """The groups of one kind, "client" or "class"."""

    kind: str
    rows: list[GroupRow]
    num_more: int  # groups without a row


def group_tables(document: Document) -> list[GroupTable]:
    """Nothing where there is one client and one class."""
    return [
        GroupTable(
            kind,
            [
                _row(document, result, kind, name)
                for name in names
                for result in document["results"]
            ],
            len(document["results"][0]["groups"][kind]) - len(names),
        )
        for kind, names in document["listed_groups"].items()
    ]


def _row(document: Document, result: dict[str, Any], kind: str, name: str) -> GroupRow:
    group = result["groups"][kind][name]
    first = document["results"][0]["groups"][kind][name]
    differences = result.get("against_first", {}).get("groups", {}).get(kind, {}).get(name, {})
    cells = []
    for column in columns(document):
        value, base = (_value(g, column) * column.factor for g in (group, first))
        difference = differences.get(column.measure, {}).get(column.statistic)
        if math.isnan(value) or math.isnan(base):
            difference = None
        cells.append(Cell(value, difference, verdict(difference, column, base)))
    service, seconds = group.get("service", {}), result["totals_by_seed"]["seconds"]
    return GroupRow(
        name or "(no name)",
        result["name"],
        group["requests"],
        group["unfinished"],
        cells,
        None if not service else service["competing_seconds"] / max(sum(seconds), 1e-9),
        service.get("share"),
        service.get("due_share"),
        service.get("behind"),
    )


def _value(group: dict[str, Any], column: Row) -> float:
    if column is GOOD:
        return float(group.get("good_share", math.nan))
    return float(group["durations"][column.measure][column.statistic])


def render_groups(document: Document) -> list[str]:
    """Lines of fixed width, with an empty one before each table."""
    lines: list[str] = []
    for table in group_tables(document):
        lines += ["", *_table(table, columns(document))]
    if any(SURE in line for line in lines):
        first = document["results"][0]["name"]
        lines.append(
            f"{SURE} surely differs from {first}, by more than 1%: the 95% intervals hold for all "
            "groups of a kind together"
        )
    if any(" share, %" in line for line in lines):
        lines.append(COMPETING)
    return lines


def _table(table: GroupTable, columns: list[Row]) -> list[str]:
    has_shares = any(row.share is not None for row in table.rows)
    has_unfinished = any(row.unfinished for row in table.rows)
    heads = [f"by {table.kind}, ms", "", "requests", *(["unfinished"] if has_unfinished else [])]
    heads += [column.label for column in columns]
    heads += ["competing, %", "share, %", "due, %", "behind"] if has_shares else []
    lines = [heads]
    last = None
    for row in table.rows:
        words = ["" if row.name == last else row.name, row.config, str(row.requests)]
        words += [str(row.unfinished)] if has_unfinished else []
        words += [_shown(cell, column) for cell, column in zip(row.cells, columns, strict=True)]
        if has_shares:
            shares = (row.competing, row.share, row.due_share)
            words += ["-" if share is None else f"{100 * share:.1f}" for share in shares]
            words.append("-" if row.behind is None else f"{row.behind:.0f}")
        lines.append(words)
        last = row.name
    shown = in_columns(lines, left=(0, 1))
    if table.num_more:
        plural = "clients" if table.kind == "client" else "classes"
        shown.append(f"and {table.num_more} more {plural}, whose first tokens came sooner (--json)")
    return shown


def _shown(cell: Cell, column: Row) -> str:
    if math.isnan(cell.value):
        return "- "
    return f"{cell.value:.{column.digits}f}{SURE if cell.verdict in ('better', 'worse') else ' '}"
