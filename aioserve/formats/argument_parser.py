"""One argument of a call whose arguments stand in tags: its name, and its value as it comes.

Values are typed by the tool's schema. Knows no family, and not what stands around arguments.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aioserve.formats.call_parser import CallParser
from aioserve.formats.events import Arguments
from aioserve.formats.json_value import JsonValue
from aioserve.formats.reply_format import dumps
from aioserve.formats.tags import NAME, Tags
from aioserve.formats.text import any_of, match_end, overlap
from aioserve.formats.typed_text import argument_types, typed_json

_JSON_BEGINS = frozenset('{["-0123456789tfnTFN')


class ArgumentParser(CallParser):
    """Streams a text as it comes, and any other value when it has ended: at the first end of its
    tag; an object or an array at the first one behind its own end. Of a value that is cut, only
    what is known to be of its text is told.
    """

    tags: ClassVar[Tags]
    _value_ends: ClassVar[tuple[str, ...]]
    _value_end: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "tags"):
            cls.markers = cls.tags.markers
            lines = ("\n", "") if cls.tags.has_lines else ("",)
            cls._value_ends = tuple(line + cls.tags.value_end for line in lines)
            cls._value_end = any_of(cls._value_ends)

    name: list[str]  # of the call or argument that is being read, in pieces
    schema: Mapping[str, Any]  # of the arguments of this call
    num_values: int  # of this call so far

    @abstractmethod
    def next_argument(self) -> bool:
        """The state behind an argument."""

    @abstractmethod
    def end_call(self) -> None:
        """Where no argument goes on: what is held is content."""

    def skip_any(self, texts: Sequence[str], ends: Sequence[str]) -> str | None:
        """Read one of `texts` or `ends`, and return it; of `ends`, a beginning is enough at the end
        of a reply. Empty if none is there, None if what is there may become one.
        """
        is_open = False
        for text in (*texts, *ends):
            found = self.skip_end(text) if text in ends else self.skip(text)
            if found:
                return text
            is_open |= found is None
        return None if is_open else ""

    def read_key(self) -> bool:
        self.name.append(self.take(match_end(NAME, self.text, self.at)))
        if self.at == len(self.text):
            return self._is_cut()
        self.state = self._after_key
        return True

    def _is_cut(self) -> bool:
        """At the end of a reply, what was begun is no content. Returns that more text is needed."""
        if self.is_last:
            self.held = None
        return False

    def _after_key(self) -> bool:
        found = self.skip_any(self.tags.read_middles, [])
        name = "".join(self.name).strip()
        if found is None:
            return False
        if self.is_last and any(
            each.startswith(self.text[self.at :]) for each in self.tags.read_middles
        ):
            self.take(len(self.text))
            return self._is_cut()
        if not found or not name:
            self.end_call()
            return True
        self.held = None
        between = ", " if self.num_values else ""
        self.events.append(Arguments(f"{between}{dumps(name)}: "))
        self.num_values += 1
        self._key, self._types = name, argument_types(self.schema, name)
        if self.tags.middles is not None and found in self.tags.middles:
            self._types = {"string"} if found == self.tags.middles[0] else self._types - {"string"}
        self._value: list[str] = []
        self.state = self._begin_value
        return True

    def _begin_value(self) -> bool:
        if self.at == len(self.text):
            return False
        if self.tags.has_lines and self.text[self.at] == "\n":
            self.take(self.at + 1)
        if self._types == {"string"}:
            self._begin_text()
        else:
            self.state = self._see_value
        return True

    def _see_value(self) -> bool:
        """Whether it is a text for sure, or an object or an array."""
        start = self.at
        is_seen = self.skip_space()
        self._value.append(self.text[start : self.at])
        if not is_seen:
            return False
        char, may_be_text = self.text[self.at], not self._types or "string" in self._types
        if may_be_text and char not in _JSON_BEGINS:
            self._begin_text()
        elif char in "{[" and not may_be_text:
            self.value = JsonValue()
            self.state = self._read_json
        else:
            self.state = self._read_value
        return True

    def _begin_text(self) -> None:
        self._tell_text('"', "".join(self._value))
        self.state = self._read_text

    def _tell_text(self, before: str, text: str, after: str = "") -> None:
        self.events.append(Arguments(f"{before}{dumps(text)[1:-1]}{after}"))

    def _read_text(self) -> bool:
        text, is_ended = self._take_value()
        if text or is_ended:
            self._tell_text("", text, '"' if is_ended else "")
        if is_ended:
            self.state = self.next_argument
        return is_ended

    def _read_json(self) -> bool:
        """An object or an array, up to its own end: in its strings there may be any tag."""
        self._value.append(self.take(self.value.feed(self.text, self.at)))
        if not (self.value.is_done or self.is_last):
            return False
        if self.value.is_broken or not self.value.is_done:
            # It is none: read it again, up to the tag.
            self.text, self.at = "".join(self._value) + self.text[self.at :], 0
            self._value = []
        self.state = self._read_value
        return True

    def _read_value(self) -> bool:
        text, is_ended = self._take_value()
        self._value.append(text)
        if is_ended:
            self.events.append(Arguments(typed_json("".join(self._value), self.schema, self._key)))
            self.state = self.next_argument
        return is_ended

    def _take_value(self) -> tuple[str, bool]:
        """More of a value, and whether it has ended, with its tag."""
        found = self._value_end.search(self.text, self.at)
        if found is not None:
            text = self.take(found.start())
            self.take(found.end())
            return text, True
        text = self.take(len(self.text) - overlap(self.text, self._value_ends, self.at))
        if self.is_last:
            self.take(len(self.text))  # a tag that was cut
        return text, False
