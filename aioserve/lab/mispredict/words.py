"""Curves over the error of predictions in words: a table, and where each policy falls behind.

Knows curves; measures nothing.
"""

from collections.abc import Sequence
from itertools import groupby

from aioserve.lab.comparison.rows import Row, number, parse_measure
from aioserve.lab.comparison.runs import Apart
from aioserve.lab.mispredict.curves import Curve, Curves
from aioserve.lab.mispredict.errors import KINDS

#: What a verdict says of a policy beside what it is compared with; any other: level with it.
STANDS = {"better": "ahead of", "worse": "behind"}
LEVEL = "not distinguishable from"


def headline(curves: Curves) -> str:
    """What was measured, in one line."""
    row, (symbol, meaning, _) = parse_measure(curves.measure), KINDS[curves.kind]
    seeds = f"{len(curves.seeds)} seeds" if len(curves.seeds) > 1 else "1 seed, hence no intervals"
    better = "more" if row.good > 0 else "less"
    return (
        f"{curves.workload}: {curves.num_requests} requests in {curves.seconds:.0f} s, {seeds}; "
        f"{row.label}: {better} is better. {symbol}: {meaning}."
    )


def render(curves: Curves) -> str:
    """The table of all policies, and a paragraph on each, as text of fixed width."""
    row = parse_measure(curves.measure)
    head = ("policy", KINDS[curves.kind][0], "value", "against itself without", "", "against", "")
    lines = [headline(curves), ""]
    table = [[*head[:5], f"against {curves.baseline}", ""]]
    table.append([curves.baseline, "none", number(curves.baseline_value, row), "", "", "", ""])
    for curve in curves.curves:
        apart = curve.blind_against_baseline
        blind = number(curve.blind, row)
        table.append([curve.policy, "none", blind, "", "", apart.in_words(row), apart.verdict])
        for point in curve.points:
            table.append(
                [
                    "",
                    f"{point.error:g}",
                    number(point.value, row),
                    point.against_blind.in_words(row),
                    point.against_blind.verdict,
                    point.against_baseline.in_words(row),
                    point.against_baseline.verdict,
                ]
            )
    widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
    for cells in table:
        first = f"{cells[0]:{widths[0]}}"
        texts = [f"{text:>{width}}" for text, width in zip(cells[1:6], widths[1:6], strict=True)]
        lines.append("  ".join([first, *texts, cells[6]]).rstrip())
    lines += ["", *(sentence for curve in curves.curves for sentence in in_words(curve, curves))]
    return "\n".join(lines)


def in_words(curve: Curve, curves: Curves) -> list[str]:
    """Where the policy falls behind the baseline, and where behind itself without predictions."""
    row = parse_measure(curves.measure)
    sizes = [point.error for point in curve.points]
    symbol = KINDS[curves.kind][0]
    against = [point.against_baseline for point in curve.points]
    said = f"{curve.policy} is {_stretches(sizes, against, curves.baseline, symbol)}"
    at = crossing(sizes, [apart.value for apart in against], row)
    if at is not None:
        said += f"; the means cross at about {symbol} {at:.2g}"
    blind = [point.against_blind for point in curve.points]
    itself = "itself without predictions"
    return [f"{said}. It is {_stretches(sizes, blind, itself, symbol)}."]


def crossing(sizes: Sequence[float], differences: Sequence[float], row: Row) -> float | None:
    """The first error at which the mean falls behind, on a straight line between two that were
    measured. None: it never does, or from the first on.
    """
    ahead = [difference * row.good for difference in differences]
    for i in range(1, len(sizes)):
        if ahead[i - 1] >= 0 > ahead[i] and ahead[0] > 0:
            share = ahead[i - 1] / (ahead[i - 1] - ahead[i])
            return sizes[i - 1] + share * (sizes[i] - sizes[i - 1])
    return None


def _stretches(sizes: Sequence[float], against: Sequence[Apart], other: str, symbol: str) -> str:
    """`ahead of fcfs at sigma 0 to 0.5, behind it at 1 and 2`, by what the intervals say."""
    stands = [STANDS.get(apart.verdict, LEVEL) for apart in against]
    found = [
        (stand, [size for _, size in pairs])
        for stand, pairs in groupby(zip(stands, sizes, strict=True), key=lambda pair: pair[0])
    ]
    if len(found) == 1:
        return f"{found[0][0]} {other} at every {symbol} from {sizes[0]:g} to {sizes[-1]:g}"
    parts: list[str] = []
    for stand, own in found:
        where = f"{own[0]:g}" if len(own) == 1 else f"{own[0]:g} to {own[-1]:g}"
        what = f"{other} at {symbol}" if not parts else "it at"
        parts.append(f"{stand} {what} {where}")
    return ", ".join(parts)
