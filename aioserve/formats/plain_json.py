"""A reply that is calls as JSON and nothing else: an object, several, or an array of them.

Only calls of known tools are taken for calls: other JSON may be what was asked for.
"""

import re
from collections.abc import Sequence

from aioserve.formats import (
    ARGUMENT_KEYS,
    Beginning,
    CallObject,
    CallParser,
    Function,
    Literal,
    Reply,
    alternatives,
    match_end,
    object_of,
    repeated,
)

_SEPARATORS = re.compile(r"[\s,;]*")

# In patterns of a grammar.
_SPACE = r"[ \t\r\n]{0,20}"
_BEGINNING = r'/[ \t\r\n,;\[\]]*\{_("type"_:_"function"_,_)?"name"_:_"NAME"_,_"(KEYS)"_:/'.replace(
    "_", _SPACE
).replace("KEYS", "|".join(ARGUMENT_KEYS))


class PlainJsonParser(CallParser):
    """Decided by the first character that is no space; for the next call, by what follows one."""

    has_text_before = False

    def __init__(self, functions: Sequence[Function], prompt_end: str = "") -> None:
        super().__init__(functions, prompt_end)
        self._is_array = False

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return None  # no template shows that it is this and not another's

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

    @classmethod
    def write(cls, reply: Reply) -> str:
        if reply.content and reply.calls:
            raise ValueError("a reply is either content or calls")
        calls = ", ".join(map(object_of, reply.calls))
        return reply.content or (f"[{calls}]" if calls else "")

    def begin(self) -> bool:
        self.hold()
        self.state = self._first
        return True

    def _first(self) -> bool:
        if not self.skip_space():
            return False
        char = self.text[self.at]
        if char == "[" and not self._is_array:
            self._is_array = True
            self.take(self.at + 1)
            self.state = self._first
        elif char == "{":
            self._open()
        else:
            self._close()
        return True

    def _open(self) -> None:
        self.object = CallObject(self.functions)
        self.state = self._read_call

    def _read_call(self) -> bool:
        return self.read_object(then=self._after_call, otherwise=self._rest)

    def _after_call(self) -> bool:
        self.take(match_end(_SEPARATORS, self.text, self.at))  # no content
        if self.at == len(self.text):
            return False
        char = self.text[self.at]
        if char == "]" and self._is_array:
            self._is_array = False
            self.take(self.at + 1)
        else:
            self.hold()
            self.marker = ""  # what comes stands behind none
            self._first()
        return True

    def _close(self) -> None:
        self.give_back()
        self.state = self._rest

    def _rest(self) -> bool:
        self.say(self.take(len(self.text)))
        return False
