"""Mistral: `[TOOL_CALLS]` and an array of calls, or `[TOOL_CALLS]name[ARGS]{...}` for each."""

import re
import secrets
import string
from collections.abc import Sequence

from aioserve.features.formats import (
    Beginning,
    Call,
    CallObject,
    CallParser,
    Function,
    JsonValue,
    Literal,
    Reply,
    alternatives,
    any_of,
    match_end,
    object_of,
    repeated,
)

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_OPENING = any_of([_CALLS])
_NAME = re.compile(r"[\w.\-]*", re.ASCII)
_ID_CHARACTERS = string.ascii_letters + string.digits
_OWN_ID = re.compile("[a-zA-Z0-9]{9}")
_SEPARATORS = re.compile(r"[\s,]*")


class MistralParser(CallParser):
    """Ids are nine letters and digits: its templates refuse others when they come back."""

    markers = (_CALLS, _ARGS, _ID)

    @staticmethod
    def make_id() -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return _CALLS if _CALLS in template else None

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

    @classmethod
    def write(cls, reply: Reply) -> str:
        calls = ", ".join(map(object_of, reply.calls))
        return reply.content + (f"{_CALLS}[{calls}]" if calls else "")

    def begin(self) -> bool:
        return self.read_content(_OPENING, self._open)

    def _open(self) -> bool:
        if not self.skip_space():
            return False
        if self.text[self.at] == "[":
            self.take(self.at + 1)
            self.state = self._next
        else:
            self._name: list[str] = []
            self._id: list[str] = []
            self.state = self._read_name
        return True

    # An array

    def _next(self) -> bool:
        self.take(match_end(_SEPARATORS, self.text, self.at))
        if self.at == len(self.text):
            return False
        if self.text[self.at] == "]":
            self.take(self.at + 1)
            self.held = None
            self.state = self.begin
        elif self.text[self.at] == "{":
            self.object = CallObject()
            self.state = self._read_call
        else:
            self._close()
        return True

    def _read_call(self) -> bool:
        return self.read_object(then=self._after_call, otherwise=self.begin)

    def _after_call(self) -> bool:
        self.hold()
        self.state = self._next
        return True

    # A name

    def _read_name(self) -> bool:
        self._name.append(self.take(match_end(_NAME, self.text, self.at)))
        if self.at == len(self.text):
            return False
        self.state = self._after_name
        return True

    def _after_name(self) -> bool:
        if not self.skip_space():
            return False
        for marker in (_ARGS, _ID):
            found = self.skip(marker)
            if found is None:
                return False
            if found:
                self.state = self._after_name if marker == _ARGS else self._read_id
                return True
        if self.text[self.at] != "{" or not any(self._name):
            self._close()
            return True
        call_id = "".join(self._id)
        self.tell([Call("".join(self._name), call_id if _OWN_ID.fullmatch(call_id) else None)])
        self.value = JsonValue()
        self.state = self._read_own_arguments
        return True

    def _read_id(self) -> bool:
        self._id.append(self.take(match_end(_NAME, self.text, self.at)))
        if self.at == len(self.text):
            return False
        self.state = self._after_name
        return True

    def _read_own_arguments(self) -> bool:
        return self.read_arguments(then=self.begin)

    def _close(self) -> None:
        self.give_back()
        self.state = self.begin
