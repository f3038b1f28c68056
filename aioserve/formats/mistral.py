"""Mistral: `[TOOL_CALLS]` and an array of calls, or `[TOOL_CALLS]name[ARGS]{...}` for each."""

import re
import secrets
import string
from collections.abc import Sequence

from aioserve.formats.call_object import CallObject
from aioserve.formats.call_parser import (
    Beginning,
    CallParser,
    Function,
    Literal,
    alternatives,
    any_of,
    repeated,
)
from aioserve.formats.events import Call
from aioserve.formats.json_value import JsonValue
from aioserve.formats.text import match_end

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_OPENING = any_of([_CALLS])
_NAME = re.compile(r"[\w.\-]*", re.ASCII)
_ID_CHARACTERS = string.ascii_letters + string.digits
_SEPARATORS = re.compile(r"[\s,]*")


class MistralParser(CallParser):
    """Ids are nine letters and digits: its templates refuse others when they come back."""

    markers = (_CALLS, _ARGS, _ID)

    @staticmethod
    def make_id() -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CALLS in template

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        calls = repeated("call", literal(", "), is_parallel)
        return "\n".join(
            [
                f"calls: {literal(_CALLS)} array",
                f"array: {literal('[')} {calls} {literal(']')}",
                alternatives(functions, ("name", "arguments"), literal),
            ]
        )

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        named = [
            f"{literal(function.name)} {literal(_ARGS)}? arguments_{i}"
            for i, function in enumerate(functions)
        ]
        return [Beginning(literal(_CALLS), f"(array | {' | '.join(named)})")]

    def _begin(self) -> bool:
        return self._read_content(_OPENING, self._open)

    def _open(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[self._at] == "[":
            self._take(self._at + 1)
            self._state = self._next
        else:
            self._name: list[str] = []
            self._state = self._read_name
        return True

    # An array

    def _next(self) -> bool:
        self._take(match_end(_SEPARATORS, self._text, self._at))
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "]":
            self._take(self._at + 1)
            self._held = None
            self._state = self._begin
        elif self._text[self._at] == "{":
            self._object = CallObject()
            self._state = self._read_call
        else:
            self._close()
        return True

    def _read_call(self) -> bool:
        return self._read_object(then=self._after_call, otherwise=self._begin)

    def _after_call(self) -> bool:
        self._hold()
        self._state = self._next
        return True

    # A name

    def _read_name(self) -> bool:
        self._name.append(self._take(match_end(_NAME, self._text, self._at)))
        if self._at == len(self._text):
            return False
        self._state = self._after_name
        return True

    def _after_name(self) -> bool:
        if not self._skip_space():
            return False
        for marker in (_ARGS, _ID):
            found = self._skip(marker)
            if found is None:
                return False
            if found:
                self._state = self._after_name if marker == _ARGS else self._read_id
                return True
        if self._text[self._at] != "{" or not any(self._name):
            self._close()
            return True
        self._tell([Call("".join(self._name))])
        self._value = JsonValue()
        self._state = self._read_own_arguments
        return True

    def _read_id(self) -> bool:
        self._take(match_end(_NAME, self._text, self._at))
        if self._at == len(self._text):
            return False
        self._state = self._after_name
        return True

    def _read_own_arguments(self) -> bool:
        return self._read_arguments(then=self._begin)

    def _close(self) -> None:
        self._give_back()
        self._state = self._begin
