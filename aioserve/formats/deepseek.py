"""DeepSeek V3, R1 and V3.1: a block of calls between markers, each a name and its arguments."""

import re
from collections.abc import Sequence
from typing import ClassVar

from aioserve.formats.call_parser import (
    Beginning,
    CallParser,
    Function,
    Literal,
    any_of,
    json_rule,
    repeated,
)
from aioserve.formats.events import Arguments, Call
from aioserve.formats.json_value import JsonValue
from aioserve.formats.text import match_end


def _marker(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"  # a bar of full width


_CALLS, _CALLS_END = _marker("tool▁calls▁begin"), _marker("tool▁calls▁end")
_CALL, _SEP, _CALL_END = map(_marker, ("tool▁call▁begin", "tool▁sep", "tool▁call▁end"))
_OPENING = any_of([_CALLS, _CALL])
_KIND = "function"  # V3 says it before the name
_FENCE, _FENCE_END = "```json", "```"
_HEADER = re.compile(r"[^<\n]*")
_LINE = re.compile(r"[^\n]*")


class DeepSeekV31Parser(CallParser):
    """Reads both forms: `name<sep>{...}` as V3.1 writes it, and V3's, with the name in a line."""

    _between: ClassVar[str] = ""  # two calls
    markers = (_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END)

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CALLS in template

    @classmethod
    def _call(cls, name: str, literal: Literal) -> tuple[str, str]:
        """What stands before the arguments and after them, in a grammar."""
        return f"{literal(name)} {literal(_SEP)}", ""

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        each = " | ".join(f"call_{i}" for i in range(len(functions)))
        calls = repeated("call", literal(cls._between), is_parallel)
        rules = [
            f"calls: {literal(_CALLS)} block",
            f"block: {calls} {literal(_CALLS_END)}",
            f"call: {literal(_CALL)} unmarked",
            f"unmarked: ({each}) {literal(_CALL_END)}",
        ]
        for i, function in enumerate(functions):
            before, after = cls._call(function.name, literal)
            rules.append(f"call_{i}: {before} arguments_{i} {after}".rstrip())
            rules.append(f"arguments_{i}: {json_rule(function.parameters)}")
        return "\n".join(rules)

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(_CALLS), "block"), Beginning(literal(_CALL), "unmarked")]

    def _begin(self) -> bool:
        return self._read_content(_OPENING, self._open)

    def _open(self) -> bool:
        self._header: list[str] = []
        self._state = self._read_header if self._marker == _CALL else self._next
        return True

    def _next(self) -> bool:
        """Another call, or the end of the block."""
        if not self._skip_space():
            return False
        is_end = self._skip_end(_CALLS_END)
        is_call = False if is_end else self._skip(_CALL)
        if is_end:
            self._held = None
            self._state = self._begin
        elif is_call:
            self._header = []
            self._state = self._read_header
        elif is_end is None or is_call is None:
            return False
        else:
            self._close()
        return True

    def _read_header(self) -> bool:
        """The name, or that it is a function."""
        self._header.append(self._take(match_end(_HEADER, self._text, self._at)))
        if self._at == len(self._text):
            return False
        found = self._skip(_SEP)
        if found is None:
            return False
        if found:
            self._state = self._after_sep
        else:
            self._close()
        return True

    def _after_sep(self) -> bool:
        if not self._skip_space():
            return False
        name = "".join(self._header).strip()
        self._header = []
        if name == _KIND and self._text[self._at] != "{":
            self._state = self._read_name
        else:
            self._call_begins(name)
        return True

    def _read_name(self) -> bool:
        self._header.append(self._take(match_end(_LINE, self._text, self._at)))
        if self._at == len(self._text):
            return False
        self._call_begins("".join(self._header).strip())
        return True

    def _call_begins(self, name: str) -> None:
        if not name:
            self._close()
            return
        self._tell([Call(name)])
        self._value = JsonValue()
        self._state = self._before_arguments

    def _before_arguments(self) -> bool:
        if not self._skip_space() or self._skip(_FENCE) is None or not self._skip_space():
            return False
        if self._text[self._at] == "{":
            self._state = self._read_own_arguments
        else:  # a call without any
            self._events.append(Arguments("{}"))
            self._state = self._after_arguments
        return True

    def _read_own_arguments(self) -> bool:
        return self._read_arguments(then=self._after_arguments)

    def _after_arguments(self) -> bool:
        if not self._skip_space() or self._skip(_FENCE_END) is None or not self._skip_space():
            return False
        if self._skip_end(_CALL_END) is None:
            return False
        self._hold()
        self._state = self._next
        return True

    def _close(self) -> None:
        self._give_back()
        self._state = self._begin


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Writes V3's form where a call is forced."""

    _between = "\n"

    @classmethod
    def fits(cls, template: str) -> bool:
        return super().fits(template) and _FENCE in template

    @classmethod
    def _call(cls, name: str, literal: Literal) -> tuple[str, str]:
        before = f"{literal(_KIND)} {literal(_SEP)} {literal(f'{name}{chr(10)}{_FENCE}{chr(10)}')}"
        return before, literal(f"{chr(10)}{_FENCE_END}")
