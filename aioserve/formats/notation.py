"""Notations of values that are no JSON, in which some models write the arguments of calls.

`(a=1, b="x", c=[True, None])` as Python writes it; `{a:1,b:<|"|>x<|"|>}` as Gemma 4 does. Reading
them is `noted_arguments`'s, binding them `noted_grammar`'s.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Notation(NamedTuple):
    """How a family of models writes the arguments of a call, and the values in them."""

    arguments: tuple[str, str, str]  # what opens them, stands behind a name, and closes them
    quotes: tuple[str, ...]  # that may stand around texts, the longest first
    quote: str  # that is written, where a text has none of it
    is_escaped: bool  # whether texts have escapes as in Python
    separator: str  # of items
    colon: str  # behind a key
    words: tuple[str, str, str]  # true, false, null
    has_bare_keys: bool  # whether keys inside of values stand without quotes


_QUOTES = ('"""', "'''", '"', "'")
PYTHON = Notation(("(", "=", ")"), _QUOTES, "'", True, ", ", ": ", ("True", "False", "None"), False)
GEMMA = Notation(
    ("{", ":", "}"), ('<|"|>',), '<|"|>', False, ",", ":", ("true", "false", "None"), True
)

#: What may stand without quotes.
BARE = re.compile(r"[^,()\[\]{}\"'<=:\n]*")


def noted(notation: Notation, value: Any, *, is_key: bool = False) -> str:
    """A value as the notation writes it. Raises `ValueError` if it cannot."""
    if isinstance(value, bool) or value is None:
        return notation.words[2 if value is None else 1 - value]
    if isinstance(value, str):
        if is_key and notation.has_bare_keys:
            return _bare_key(value)
        return _quoted(notation, value)
    if isinstance(value, Mapping):
        items = value.items()
        keys = sorted(items, key=lambda item: item[0].lower()) if notation.has_bare_keys else items
        said = [
            f"{noted(notation, key, is_key=True)}{notation.colon}{noted(notation, each)}"
            for key, each in keys
        ]
        return f"{{{notation.separator.join(said)}}}"
    if isinstance(value, list | tuple):
        return f"[{notation.separator.join(noted(notation, each) for each in value)}]"
    return json.dumps(value)


def noted_arguments(notation: Notation, arguments: Mapping[str, Any]) -> str:
    """All arguments of a call, with what is around them. Raises `ValueError` for those that the
    notation cannot say.
    """
    opening, equals, closing = notation.arguments
    items = list(arguments.items())
    if notation.has_bare_keys:
        items.sort(key=lambda item: item[0].lower())
    said = [f"{_bare_key(key)}{equals}{noted(notation, each)}" for key, each in items]
    return f"{opening}{notation.separator.join(said)}{closing}"


def _bare_key(key: str) -> str:
    if not key.strip() or key != key.strip() or BARE.fullmatch(key) is None:
        raise ValueError(f"{key!r} cannot stand without quotes")
    return key


def _quoted(notation: Notation, text: str) -> str:
    quote = notation.quote
    if notation.is_escaped:
        is_plain = text.isprintable() and quote not in text and "\\" not in text
        return f"{quote}{text}{quote}" if is_plain else json.dumps(text, ensure_ascii=False)
    if (text + quote).find(quote) != len(text):
        raise ValueError(f"a text with {quote} in it cannot be written")
    return f"{quote}{text}{quote}"
