"""What a policy of the zoo says of itself in its docstring, which has a fixed shape.

A first sentence; then a paragraph for each label, in this order: Paper, Aim, Says, Simplified,
Cost, Needs. Reads sources, and runs nothing.
"""

import ast
import importlib.util
import re
from pathlib import Path

import msgspec

from aioserve.scheduler.registry import OptionField, read_options
from aioserve.zoo import zoo_entry_points

LABELS = ("Paper", "Aim", "Says", "Simplified", "Cost", "Needs")
#: Of the paragraph `Paper`: a year, and a venue or a number of arXiv.
_SOURCE = re.compile(r"(?:19|20)\d\d|'\d\d|arXiv \d{4}\.\d{4,5}")


class Card(msgspec.Struct, frozen=True):
    """A policy of the zoo in words: each paragraph in one line, without its label."""

    name: str  # `zoo.srpt`
    title: str
    paper: str
    aim: str  # what it optimizes
    says: str  # what the paper says
    simplified: str  # what is otherwise here
    cost: str  # of a step
    needs: str
    options: list[OptionField]


def read_card(name: str, source: str) -> Card:
    """The card of the policy `name`. Raises `ValueError` that says what of the shape is missing."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, *paragraphs = (" ".join(part.split()) for part in docstring.split("\n\n"))
    found = [text.partition(": ")[::2] for text in paragraphs]
    labels = tuple(label for label, _ in found)
    if labels != LABELS or not all(text for _, text in found):
        raise ValueError(
            f"the docstring of {name} must have the paragraphs {', '.join(LABELS)} after its first "
            f"sentence, each with its label, a colon and a text; got {', '.join(labels) or 'none'}"
        )
    parts = {label.lower(): text for label, text in found}
    if not title.endswith(".") or _SOURCE.search(title) is None:
        raise ValueError(f"the first sentence of {name} must name a paper and its year: {title!r}")
    if _SOURCE.search(parts["paper"]) is None:
        raise ValueError(f"{name}: Paper must have a year, or a number such as arXiv 2410.01035")
    return Card(name, title, **parts, options=read_options(source))


def read_cards() -> list[Card]:
    """The cards of all policies of the zoo, sorted by name. Raises `ValueError` as above."""
    cards = []
    for entry_point in zoo_entry_points():
        spec = importlib.util.find_spec(entry_point.value)
        assert spec is not None
        assert spec.origin is not None
        cards.append(read_card(entry_point.name, Path(spec.origin).read_text(encoding="utf-8")))
    return cards
