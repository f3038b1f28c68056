"""Curves over the error of predictions as one HTML file: the chart, the words and the table.

With the style of the lab's reports; needs no network and no script. Knows curves.
"""

from html import escape

from aioserve.lab.comparison.report import FOLDER
from aioserve.lab.comparison.rows import number, parse_measure
from aioserve.lab.mispredict.chart import draw
from aioserve.lab.mispredict.curves import Curves
from aioserve.lab.mispredict.errors import KINDS
from aioserve.lab.mispredict.words import headline, in_words


def render_page(curves: Curves) -> str:
    """The report on these curves, as HTML."""
    title = "Policies over the error of predictions"
    parts = [f"<h1>{title}</h1>", f"<p>{escape(headline(curves))}</p>"]
    parts.append(f'<div class="panel">{draw(curves)}</div>')
    for curve in curves.curves:
        parts += [f"<p>{escape(text)}</p>" for text in in_words(curve, curves)]
    parts.append(_table(curves))
    style = (FOLDER / "style.css").read_text()
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}\n</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _table(curves: Curves) -> str:
    """A row for each policy and error, with the differences and their 95% intervals."""
    row = parse_measure(curves.measure)
    heads = ["policy", KINDS[curves.kind][0], row.label, f"against {curves.baseline}"]
    heads += ["against itself without predictions"]
    rows = [[curves.baseline, "none", number(curves.baseline_value, row), "", ""]]
    for curve in curves.curves:
        apart = curve.blind_against_baseline
        words = f"{apart.in_words(row)} {apart.verdict}"
        rows.append([curve.policy, "none", number(curve.blind, row), words, ""])
        for point in curve.points:
            against = [
                f"{apart.in_words(row)} {apart.verdict}"
                for apart in (point.against_baseline, point.against_blind)
            ]
            rows.append(["", f"{point.error:g}", number(point.value, row), *against])
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = [
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in cells) + "</tr>" for cells in rows
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
