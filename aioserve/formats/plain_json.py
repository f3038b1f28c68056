"""A reply that is calls as JSON and nothing else: an object, several, or an array of them.

Only calls of known tools are taken for calls: other JSON may be what was asked for.
"""

import re
from collections.abc import Collection, Sequence

from aioserve.formats.call_object import ARGUMENT_KEYS, CallObject
from aioserve.formats.call_parser import (
    Beginning,
    CallParser,
    Function,
    Literal,
    alternatives,
    repeated,
)
from aioserve.formats.text import match_end

_SEPARATORS = re.compile(r"[\s,;]*")

# In patterns of a grammar.
_SPACE = r"[ \t\r\n]{0,20}"
_BEGINNING = r'/[ \t\r\n,;\[\]]*\{_("type"_:_"function"_,_)?"name"_:_"NAME"_,_"(KEYS)"_:/'.replace(
    "_", _SPACE
).replace("KEYS", "|".join(ARGUMENT_KEYS))


class PlainJsonParser(CallParser):
    """Decided by the first character that is no space; for the next call, by what follows one."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_array = False

    @classmethod
    def fits(cls, template: str) -> bool:
        return False  # no template shows that it is this and not another's

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        calls = repeated("call", literal(", "), is_parallel)
        return "\n".join(
            [
                f"calls: {literal('[')} {calls} {literal(']')}",
                alternatives(functions, ("name", "arguments"), literal),
            ]
        )

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        """An object that begins with the name of a tool: what has no mark may also be an answer."""
        return [
            Beginning(
                _BEGINNING.replace("NAME", re.escape(function.name).replace("/", r"\/")),
                rf"/{_SPACE}/ arguments_{i} /{_SPACE}\}}/",
                has_text=False,
            )
            for i, function in enumerate(functions)
            if function.is_strict
        ]

    def _begin(self) -> bool:
        self._hold()
        self._state = self._first
        return True

    def _first(self) -> bool:
        if not self._skip_space():
            return False
        char = self._text[self._at]
        if char == "[" and not self._is_array:
            self._is_array = True
            self._take(self._at + 1)
            self._state = self._first
        elif char == "{":
            self._open()
        else:
            self._close()
        return True

    def _open(self) -> None:
        self._object = CallObject(self.names)
        self._state = self._read_call

    def _read_call(self) -> bool:
        return self._read_object(then=self._after_call, otherwise=self._rest)

    def _after_call(self) -> bool:
        self._take(match_end(_SEPARATORS, self._text, self._at))  # no content
        if self._at == len(self._text):
            return False
        char = self._text[self._at]
        if char == "]" and self._is_array:
            self._is_array = False
            self._take(self._at + 1)
        else:
            self._hold()
            self._first()
        return True

    def _close(self) -> None:
        self._give_back()
        self._state = self._rest

    def _rest(self) -> bool:
        self._say(self._take(len(self._text)))
        return False
