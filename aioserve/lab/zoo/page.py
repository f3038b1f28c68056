"""The zoo's report as one HTML file: the chart, the board, and the named policies by measure.

With the style of the lab's reports; needs no network and no script. Knows results.
"""

from collections.abc import Iterable, Sequence
from html import escape

from aioserve.lab.comparison.report import FOLDER
from aioserve.lab.comparison.rows import number
from aioserve.lab.zoo.chart import draw
from aioserve.lab.zoo.measures import MEASURES, meaning
from aioserve.lab.zoo.standard import WORKLOADS
from aioserve.lab.zoo.standing import OVERALL, leaderboard, mean_of, rank_of
from aioserve.lab.zoo.stored import Results
from aioserve.lab.zoo.words import (
    against_in_words,
    cost_in_words,
    place_in_words,
    title,
    unfinished_in_words,
)

RANKS = (
    "A rank has a range where chance leaves one open: it counts the policies that are better or "
    "worse beyond the 95% interval of the difference, seed by seed."
)


def render_page(results: Results, names: Sequence[str]) -> str:
    """The page; `names` are the policies that are shown by every measure."""
    board = leaderboard(results)
    parts = [f"<h1>The zoo: {escape(title(results))}</h1>"]
    parts.append(f'<p class="faint">{escape(RANKS)}</p>')
    for standing in board:
        if standing.name in names:
            parts.append(f"<p><b>{escape(place_in_words(standing))}</b></p>")
    parts.append(f'<div class="panel">{draw(board, names)}</div>')
    parts += ["<h2>All policies</h2>", _board(results)]
    for name in names:
        parts += [f"<h2>{escape(name)}</h2>"]
        words = [*against_in_words(results, name), unfinished_in_words(results, name)]
        words.append(cost_in_words(results.policies[name]))
        parts += [f"<p>{escape(text)}</p>" for text in words if text]
        parts.append(_measures(results, name))
    parts.append("<h2>What the measures mean</h2><dl class='meanings'>")
    parts += [f"<dt>{escape(r.label)}</dt><dd>{escape(meaning(r))}</dd>" for r in MEASURES]
    body = "\n".join([*parts, "</dl>"])
    style = (FOLDER / "style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>The zoo: {escape(title(results))}</title>\n<style>\n{style}\n</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _board(results: Results) -> str:
    rows = []
    for standing in leaderboard(results):
        cost = results.policies[standing.name].cost
        ranks = [standing.ranks[w] for w in (*WORKLOADS, OVERALL)]
        cells = [f"{100 * rank.value:.1f} <span class='faint'>#{rank}</span>" for rank in ranks]
        cells.append("-" if cost is None else f"{cost.us:,.0f}")
        rows.append([escape(standing.name), *cells])
    return _table(["policy", *WORKLOADS, OVERALL, "us a step"], rows)


def _measures(results: Results, name: str) -> str:
    rows = []
    for row in MEASURES:
        cells = []
        for workload in WORKLOADS:
            value = mean_of(results.policies[name], workload, row) * row.factor
            rank = rank_of(results, name, workload, row)
            place = "" if rank is None else f" <span class='faint'>#{rank}</span>"
            cells.append(number(value, row) + place)
        rows.append([escape(row.label), *cells])
    return _table(["value (rank)", *WORKLOADS], rows)


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines = ["<tr>" + "".join(f"<td>{text}</td>" for text in cells) + "</tr>" for cells in rows]
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
