"""Where a JSON value ends, found as its text comes: every character is looked at once.

Knows strings and brackets, no more: what stands inside of them is not judged.
"""

import re

from aioserve.formats.text import match_end

# What stands outside of strings: all else, as the "<" of a marker, shows that the value is broken.
_PLAIN = re.compile(r"[\w\s+\-.,:]*", re.ASCII)
_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[\w+\-.]*", re.ASCII)


class JsonValue:
    """One value. `feed` it text until it `is_done`; `is_broken` if no JSON goes on like that."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False

    def feed(self, text: str, start: int) -> int:
        """Read on from `text[start]`. Returns where the value ends, or the length of `text`."""
        i = start
        while i < len(text) and not self.is_done:
            if self._is_escaped:
                self._is_escaped = False
                i += 1
            elif self._in_string:
                i = self._in_string_end(text, i)
            elif self._is_scalar:
                i = match_end(_SCALAR, text, i)
                self.is_done = i < len(text)
            else:
                i = self._next(text, i)
        return i

    def finish(self) -> None:
        """Nothing more comes: a number is over, all else is broken."""
        if not self.is_done:
            self.is_done, self.is_broken = True, not self._is_scalar

    def _in_string_end(self, text: str, i: int) -> int:
        i = match_end(_IN_STRING, text, i)
        if i == len(text):
            return i
        if text[i] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_done = self._depth == 0
        return i + 1

    def _next(self, text: str, i: int) -> int:
        if self._depth:
            i = match_end(_PLAIN, text, i)
            if i == len(text):
                return i
        char = text[i]
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            self.is_done = self._depth == 0
        elif not self._depth and _SCALAR.fullmatch(char):
            self._is_scalar = True
        else:
            self.is_done = self.is_broken = True
            return i
        return i + 1
