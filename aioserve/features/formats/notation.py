"""Notations of arguments that are no JSON, as some models write them, read and told as JSON."""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aioserve.features.formats.text import argument_types, match_end, skip_space, typed_json


class Notation(NamedTuple):
    """The notation in which a family of models writes the arguments of a call, and the values in
    them.
    """

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
    """Return a value as the notation writes it. Raises `ValueError` if it cannot."""
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
    """Return all arguments of a call, with what is around them. Raises `ValueError` for those that
    the notation cannot say.
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


# Arguments of a call in a notation that is no JSON, read as they come and told as JSON. Each
# character is looked at a bounded number of times. Knows notations. Knows no format around them.


_State = Callable[[str, int, bool], int | None]

_CLOSING = {"[": "]", "{": "}", "(": ")"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[^xuU0-7]|.)", re.DOTALL
)
_BEGUN_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{0,2})?")
_ESCAPED = {
    **{"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "a": "\\u0007", "v": "\\u000b"},
    **{"\\": "\\\\", '"': '\\"', "'": "'", "/": "/", "\n": ""},
}
_AFTER_TEXT = re.compile(r"\s{0,8}")  # what ends a text in quotes stands behind that


class NotedArguments:
    """`feed` it text behind the opening until it `is_done` or `is_broken`; `told` has the JSON."""

    def __init__(self, notation: Notation, schema: Mapping[str, Any]) -> None:
        """`schema`: that of all arguments, by which a text may turn out to be a number."""
        self.is_done = False
        self.is_broken = False
        self.told: list[str] = ["{"]
        self._notation = notation
        self._schema = schema
        # What closes each open value, in its notation and in JSON, and what follows its keys.
        self._open = [(notation.arguments[2], "}", notation.arguments[1])]
        self._is_first = True  # of its value
        self._state: _State = self._item
        self._then: _State = self._item
        self._word: list[str] = []  # so far, without quotes
        self._quote = ""
        self._key: list[str] | None = None  # the name of an argument, in pieces of JSON
        self._name = ""
        self._typed: list[str] | None = None  # a text that is told by its schema, in pieces of JSON

    def feed(self, text: str, start: int, is_last: bool) -> int:
        """Read on from `text[start]`. Returns where the next character stands."""
        at = start
        while at < len(text) and not (self.is_done or self.is_broken):
            end = self._state(text, at, is_last)
            if end is None:
                break
            at = end
        if (is_last or self.is_broken) and self._word:
            word = "".join(self._word).strip()
            self.told.append(f'"{_escaped(word)}' if self.is_broken else _begun(word))
            self._word = []
        return at

    # Structure

    def _item(self, text: str, start: int, is_last: bool) -> int | None:
        """State before an item of a list, an object or the arguments, or before their end."""
        at = skip_space(text, start)
        if at == len(text):
            return at
        if text[at] == self._open[-1][0]:
            return self._close(at)
        if not self._is_first:
            self.told.append(", ")
        self._is_first = False
        self._state = self._read_key if self._open[-1][1] == "}" else self._value
        return at

    def _close(self, at: int) -> int:
        self.told.append(self._open.pop()[1])
        self.is_done = not self._open
        self._is_first, self._state = False, self._after
        return at + 1

    def _after(self, text: str, start: int, is_last: bool) -> int | None:
        """State behind a value: a comma, or what closes the value around it."""
        at = skip_space(text, start)
        if at == len(text):
            return at
        if text[at] == ",":
            self._state = self._item
            return at + 1
        if text[at] == self._open[-1][0]:
            return self._close(at)
        self.is_broken = True
        return at

    def _read_key(self, text: str, at: int, is_last: bool) -> int | None:
        self._key = [] if len(self._open) == 1 else None
        quote = self._opening_quote(text, at)
        if quote is None:
            return len(text) if is_last else None
        if quote:
            return self._begin_text(at, quote, then=self._colon)
        self._then, self._state = self._end_key, self._bare
        return at

    def _end_key(self, text: str, at: int, is_last: bool) -> int | None:
        word = "".join(self._word).strip()
        if not word:
            self.is_broken = True
            return at
        self._word = []
        self._tell_piece(f'"{_escaped(word)}"')
        self._state = self._colon
        return at

    def _colon(self, text: str, start: int, is_last: bool) -> int | None:
        at = skip_space(text, start)
        if at == len(text):
            return at
        if text[at] != self._open[-1][2]:
            self.is_broken = True
            return at
        self.told.append(": ")
        if self._key is not None:
            self._name, self._key = json.loads("".join(self._key)), None
        self._state = self._value
        return at + 1

    def _value(self, text: str, start: int, is_last: bool) -> int | None:
        at = skip_space(text, start)
        if at == len(text):
            return at
        char = text[at]
        quote = self._opening_quote(text, at)
        if quote is None:
            return len(text) if is_last else None
        if quote:
            types = argument_types(self._schema, self._name) if len(self._open) == 1 else {"string"}
            self._typed = [] if types and "string" not in types else None
            return self._begin_text(at, quote, then=self._after)
        if char in "[{" or (char == "(" and self._notation.arguments[0] == "("):
            is_object = char == "{"
            self.told.append("{" if is_object else "[")
            self._open.append((_CLOSING[char], "}" if is_object else "]", ":"))
            self._is_first, self._state = True, self._item
            return at + 1
        self._then, self._state = self._end_word, self._bare
        return at

    # What stands without quotes

    def _bare(self, text: str, at: int, is_last: bool) -> int | None:
        end = match_end(BARE, text, at)
        self._word.append(text[at:end])
        if end < len(text):
            self._state = self._then
        return end

    def _end_word(self, text: str, at: int, is_last: bool) -> int | None:
        word = "".join(self._word).strip()
        if not word or text[at] not in (",", self._open[-1][0]):
            self.is_broken = True
            return at
        self._word = []
        self.told.append(_json_of(word))
        self._state = self._after
        return at

    # Texts

    def _opening_quote(self, text: str, at: int) -> str | None:
        """Return the quote that stands here; empty if none does, None if that is not known yet."""
        for quote in self._notation.quotes:
            if text.startswith(quote, at):
                return quote
            if quote.startswith(text[at : at + len(quote)]):
                return None
        return ""

    def _begin_text(self, at: int, quote: str, then: _State) -> int:
        self._quote, self._then, self._state = quote, then, self._text
        if self._typed is None:
            self._tell_piece('"')
        return at + len(quote)

    def _text(self, text: str, at: int, is_last: bool) -> int | None:
        """More of a text: up to an escape, or what may be its end."""
        ends = [at for at in (text.find(self._quote[0], at), self._escape_at(text, at)) if at >= 0]
        end = min(ends, default=len(text))
        if end > at:
            self._tell_piece(_escaped(text[at:end]))
            return end
        if text[at] != self._quote[0]:
            return self._read_escape(text, at, is_last)
        is_end = self._is_end(text, at)
        if is_end:
            self._end_text()
            return at + len(self._quote)
        if is_end is not None:
            self._tell_piece(_escaped(text[at]))
            return at + 1
        return len(text) if is_last else None

    def _escape_at(self, text: str, at: int) -> int:
        return text.find("\\", at) if self._notation.is_escaped else -1

    def _is_end(self, text: str, at: int) -> bool | None:
        """Return whether a text ends here. Models write quotes in quotes: of one sign, that is the
        end behind which the notation goes on.
        """
        if not text.startswith(self._quote, at):
            return None if self._quote.startswith(text[at : at + len(self._quote)]) else False
        if not self._notation.is_escaped:
            return True
        after = match_end(_AFTER_TEXT, text, at + len(self._quote))
        if after == len(text):
            return None
        return text[after] in ",:)]}"

    def _end_text(self) -> None:
        if self._typed is None:
            self._tell_piece('"')
        else:
            said = json.loads(f'"{"".join(self._typed)}"')
            self._typed = None
            self.told.append(typed_json(said, self._schema, self._name))
        self._state = self._then

    def _read_escape(self, text: str, at: int, is_last: bool) -> int | None:
        if _BEGUN_ESCAPE.fullmatch(text, at):
            return len(text) if is_last else None
        found = _ESCAPE.match(text, at)
        if found is None:
            self._tell_piece("\\\\")
            return at + 1
        self._tell_piece(_unescaped(found.group()))
        return found.end()

    def _tell_piece(self, piece: str) -> None:
        """More of a text or a key, as JSON."""
        if self._typed is not None:
            self._typed.append(piece)
            return
        self.told.append(piece)
        if self._key is not None:
            self._key.append(piece)


def _unescaped(escape: str) -> str:
    """Return an escape of Python as JSON has it; one that Python does not know is the text that it
    is.
    """
    sign, code = escape[1], escape[2:]
    if sign in "xuU" and code:
        number = int(code, 16)
        return _escaped(chr(number)) if number <= 0x10FFFF else _escaped(escape)
    if sign.isdigit():
        return _escaped(chr(int(escape[1:], 8))) if sign < "8" else _escaped(escape)
    return _ESCAPED.get(sign, _escaped(escape))


def _escaped(text: str) -> str:
    """Return a text inside of a JSON string; half a surrogate pair stays an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1]
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _begun(word: str) -> str:
    """Return the beginning of what stands without quotes, as far as it is sure in JSON."""
    if _NUMBER.fullmatch(word):
        return word
    may_be = any(known.startswith(word.lower()) for known in _WORDS) or word in ("-", "+")
    return "" if may_be or word[:1].isdigit() else f'"{_escaped(word)}'


def _json_of(word: str) -> str:
    """Return what stands without quotes, as JSON."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _NUMBER.fullmatch(word):
        return word
    for read in (int, lambda text: int(text, 0), float):
        try:
            number = read(word)
        except ValueError:
            continue
        if math.isfinite(number):
            return json.dumps(number)
    return f'"{_escaped(word)}"'
