"""One `{"name": ..., "arguments": ...}`, read as it comes.

Knows that object in any order of its keys. Knows nothing about what stands around it.
"""

from collections.abc import Collection

import msgspec

from aioserve.errors import UNREADABLE
from aioserve.formats.events import Arguments, Call, Event
from aioserve.formats.json_value import JsonValue
from aioserve.formats.text import skip_space

ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = {"name", "type", "id", "description", *ARGUMENT_KEYS}


class CallObject:
    """`feed` it text until it `is_done` or `is_broken`; `is_named` once its call was told.

    The arguments are told as they come, if the name has come before them. Arguments that are JSON
    in a string are told when the string has ended. With `names` only calls of those are calls, and
    no object with a key that calls do not have.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.is_done = False
        self.is_broken = False
        self.is_named = False
        self._names = names
        self._expected = "{"
        self._key: str | None = None  # None: what is being read is a key
        self._value: JsonValue | None = None
        self._pieces: list[str] = []  # of what is only understood as a whole
        self._early: list[str] | None = None  # arguments that came before the name
        self._has_arguments = False
        self._is_passed_on = False  # what is being read is told as it comes

    def feed(self, text: str, start: int, events: list[Event]) -> int:
        """Read on from `text[start]`, telling `events`. Returns where the next character stands."""
        i = start
        while not (self.is_done or self.is_broken):
            if self._value is not None:
                end = self._value.feed(text, i)
                self._on_piece(text[i:end], events)
                i = end
                if not self._value.is_done:
                    break
                self._on_value(self._value.is_broken, events)
            else:
                i = skip_space(text, i)
                if i == len(text):
                    break
                i = self._on_punctuation(text, i, events)
        return i

    def _on_punctuation(self, text: str, i: int, events: list[Event]) -> int:
        char = text[i]
        match self._expected, char:
            case ("{", "{"):
                self._expected = "first key"
            case ("first key" | "key", '"'):
                self._key, self._value = None, JsonValue()
                return i
            case (":", ":"):
                self._expected = "value"
            case ("value", _):
                self._begin_value(char)
                return i
            case (",", ","):
                self._expected = "key"
            case ("first key" | ",", "}"):
                self._end(events)
            case _:
                self.is_broken = True
                return i
        return i + 1

    def _begin_value(self, char: str) -> None:
        self._value = JsonValue()
        is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
        self._is_passed_on = is_arguments and char == "{"
        if is_arguments:
            self._has_arguments = True
        elif self._key in ARGUMENT_KEYS:
            self._key = ""  # a second time: of no interest

    def _on_piece(self, piece: str, events: list[Event]) -> None:
        if not self._is_passed_on:
            self._pieces.append(piece)
        elif self.is_named:
            if piece:
                events.append(Arguments(piece))
        else:
            self._early = self._early or []
            self._early.append(piece)

    def _on_value(self, is_broken: bool, events: list[Event]) -> None:
        raw, self._pieces, self._value = "".join(self._pieces), [], None
        is_passed_on, self._is_passed_on = self._is_passed_on, False
        if is_broken:
            self.is_broken = True
        elif self._key is None:
            self._key, self._expected = _decode_text(raw), ":"
            self.is_broken = self._key is None or (
                self._names is not None and self._key not in _KEYS
            )
        else:
            self._expected = ","
            if self._key == "name" and not self.is_named:
                self._on_name(_decode_text(raw), events)
            elif self._key in ARGUMENT_KEYS and not is_passed_on:
                self._on_arguments(raw, events)

    def _on_name(self, name: str | None, events: list[Event]) -> None:
        if not name or (self._names is not None and name not in self._names):
            self.is_broken = True
            return
        self.is_named = True
        events.append(Call(name))
        if self._early:
            events.append(Arguments("".join(self._early)))

    def _on_arguments(self, raw: str, events: list[Event]) -> None:
        """Arguments that are no object: JSON in a string, or null."""
        text = "{}" if raw == "null" else _decode_text(raw) or raw
        if self.is_named:
            events.append(Arguments(text))
        else:
            self._early = [text]

    def _end(self, events: list[Event]) -> None:
        if not self.is_named:
            self.is_broken = True
            return
        self.is_done = True
        if not self._has_arguments:
            events.append(Arguments("{}"))


def _decode_text(raw: str) -> str | None:
    """The text of a JSON string; None if `raw` is not a JSON string."""
    try:
        return msgspec.json.decode(raw, type=str, strict=True)
    except UNREADABLE:
        return None
