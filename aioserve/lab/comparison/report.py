"""A comparison as one HTML file that needs no network: data, drawing code and style inside.

Puts the parts of `page/` together. The drawing is done by the reader's browser.
"""

import argparse
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioserve.lab.comparison.document import Document, encode
from aioserve.lab.comparison.measures import (
    Row,
    difference_of,
    meanings,
    shown_rows,
    value_of,
    verdict,
)
from aioserve.lab.comparison.words import (
    COMPETING,
    Cell,
    columns,
    group_tables,
    headline,
    on_these_requests,
    other_differences,
    pair_summary,
    remarks,
    slo_in_words,
)
from aioserve.support.files import write

Curves = TypeVar("Curves", bound=msgspec.Struct)

FOLDER = Path(__file__).parent / "page"


def render_html(document: Document) -> str:
    """Return the page; words and table rows are those of the terminal."""
    data = {
        "headline": headline(document),
        "these": [] if "sweep" in document else on_these_requests(document),
        "remarks": [
            *document["machines"],
            *([] if "sweep" in document else other_differences(document)),
            *remarks(document),
        ],
        "mode": document["mode"],
        "slo": slo_in_words(document),
        "sweep": document.get("sweep"),
        "workload": document["workload"],
        "results": [
            {key: result[key] for key in ("name", "policy", "settings", "distributions")}
            | {"timelines": result["timelines"]}
            for result in document["results"]
        ],
        "table": _table(document),
        "has_recorded": document.get("recorded") is not None,
        "pairs": _pairs(document),
        "meanings": meanings(shown_rows(document["results"])),
        "groups": _groups(document),
    }
    # "</script>" inside of a name must not end the script.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    page = (FOLDER / "page.html").read_text()
    for name, text in (
        ("title", escape(headline(document))),
        ("style", (FOLDER / "style.css").read_text()),
        ("plots", (FOLDER / "plots.js").read_text()),
        ("page", (FOLDER / "page.js").read_text()),
        ("data", encoded),
    ):
        page = page.replace(f"@{name}@", text, 1)
    return page


def write_curves(
    arguments: argparse.Namespace,
    curves: Curves,
    draw: Callable[[Curves], str],
    render_page: Callable[[Curves], str],
) -> None:
    """Write the curves of a command to those files of `--json`, `--svg` and `--html` that are
    wanted.
    """
    write(arguments.json, encode(msgspec.to_builtins(curves)))
    if arguments.svg:
        write(arguments.svg, draw(curves).encode())
    if arguments.html:
        write(arguments.html, render_page(curves).encode())


def static_page(title: str, body: str) -> str:
    """Return a page of HTML in the style of the reports, which needs no network and no script.
    `title` is text, `body` is HTML.
    """
    style = (FOLDER / "style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def html_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table that scrolls where it is too wide. `heads` are texts, the cells are HTML."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _table(document: Document) -> list[dict[str, object]]:
    """Return rows with the values of all configurations and, from the second on, their
    differences.
    """
    results = document["results"]
    rows = []
    for row in shown_rows(results):
        cells = []
        for result in results:
            difference = difference_of(result, row)
            cells.append(
                {
                    "value": value_of(result, row),
                    "difference": _scaled(difference, row),
                    "verdict": verdict(difference, row, value_of(results[0], row)),
                }
            )
        recorded = document.get("recorded")
        real = None if recorded is None else value_of(recorded, row)
        rows.append({"label": row.label, "digits": row.digits, "recorded": real, "cells": cells})
    return rows


def _groups(document: Document) -> list[dict[str, object]]:
    """Tables of clients and classes; in a cell the value, its difference and what that amounts to,
    in milliseconds.
    """
    return [
        {
            "kind": table.kind,
            "columns": [column.label for column in columns(document)],
            "more": table.num_more,
            "note": COMPETING,
            "rows": [
                row._asdict() | {"cells": _cells(row.cells, columns(document))}
                for row in table.rows
            ],
        }
        for table in group_tables(document)
    ]


def _cells(cells: list[Cell], columns: list[Row]) -> list[dict[str, object]]:
    return [
        {
            "value": cell.value,
            "difference": _scaled(cell.difference, column),
            "verdict": cell.verdict,
        }
        for cell, column in zip(cells, columns, strict=True)
    ]


def _scaled(difference: dict[str, Any] | None, row: Row) -> dict[str, float | None] | None:
    """Return the value in the unit of its row."""
    if difference is None:
        return None
    return {
        end: None if difference[end] is None else difference[end] * row.factor
        for end in ("value", "low", "high")
    }


def _pairs(document: Document) -> list[dict[str, object]]:
    first, *others = document["results"]
    return [
        {
            "first": first["name"],
            "other": other["name"],
            "summary": pair_summary(first, other),
            "victims": other["against_first"]["victims"],
        }
        for other in others
    ]
