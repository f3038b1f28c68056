"""Kimi K2: a section of calls, each an id such as `functions.NAME:0` and JSON arguments."""

import re
from collections.abc import Sequence

from aioserve.formats import (
    Arguments,
    Beginning,
    Call,
    CallParser,
    Function,
    JsonValue,
    Literal,
    Reply,
    any_of,
    dumps,
    json_rule,
    match_end,
    repeated,
)

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = (
    f"<|{name}|>" for name in ("tool_call_begin", "tool_call_argument_begin", "tool_call_end")
)
_OPENING = any_of([_SECTION, _CALL])
_HEADER = re.compile(r"[^<\n]*")
_ID = re.compile(r"(?:functions\.)?(?P<name>[^:]+)(?P<number>:\d+)?")


class KimiK2Parser(CallParser):
    """The id is the model's own: its templates hand it back; it numbers a conversation's calls."""

    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END)

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return _SECTION if _SECTION in template else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        each = " | ".join(f"call_{i}" for i in range(len(functions)))
        rules = [
            f"calls: {literal(_SECTION)} section",
            f"section: {repeated('call', literal(''), is_parallel)} {literal(_SECTION_END)}",
            f"call: {literal(_CALL)} unmarked",
            f"unmarked: ({each}) {literal(_CALL_END)}",
        ]
        for i, function in enumerate(functions):
            name = literal(f"functions.{function.name}:")
            rules.append(f"call_{i}: {name} /[0-9]{{1,4}}/ {literal(_ARGUMENTS)} arguments_{i}")
            rules.append(f"arguments_{i}: {json_rule(function.parameters)}")
        return "\n".join(rules)

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(_SECTION), "section"), Beginning(literal(_CALL), "unmarked")]

    @classmethod
    def write(cls, reply: Reply) -> str:
        calls = [
            f"{_CALL}functions.{call.name}:{i}{_ARGUMENTS}{dumps(call.arguments)}{_CALL_END}"
            for i, call in enumerate(reply.calls)
        ]
        return reply.content + (f"{_SECTION}{''.join(calls)}{_SECTION_END}" if calls else "")

    def begin(self) -> bool:
        return self.read_content(_OPENING, self._open)

    def _open(self) -> bool:
        self._header: list[str] = []
        self.state = self._read_header if self.marker == _CALL else self._next
        return True

    def _next(self) -> bool:
        """Another call, or the end of the section."""
        if not self.skip_space():
            return False
        is_end = self.skip_end(_SECTION_END)
        is_call = False if is_end else self.skip(_CALL)
        if is_end:
            self.held = None
            self.state = self.begin
        elif is_call:
            self._header = []
            self.state = self._read_header
        elif is_end is None or is_call is None:
            return False
        else:
            self._close()
        return True

    def _read_header(self) -> bool:
        """The id, in which the name is."""
        self._header.append(self.take(match_end(_HEADER, self.text, self.at)))
        if self.at == len(self.text):
            return False
        found = self.skip(_ARGUMENTS)
        if found is None:
            return False
        call_id = "".join(self._header).strip()
        is_id = _ID.fullmatch(call_id)
        if not found or is_id is None:
            self._close()
            return True
        self.tell([Call(is_id["name"], call_id if is_id["number"] else None)])
        self.state = self._before_arguments
        return True

    def _before_arguments(self) -> bool:
        if not self.skip_space():
            return False
        self.value = JsonValue()
        if self.text[self.at] == "{":
            self.state = self._read_own_arguments
        else:  # a call without any
            self.events.append(Arguments("{}"))
            self.state = self._after_arguments
        return True

    def _read_own_arguments(self) -> bool:
        return self.read_arguments(then=self._after_arguments)

    def _after_arguments(self) -> bool:
        if not self.skip_space() or self.skip_end(_CALL_END) is None:
            return False
        self.hold()
        self.state = self._next
        return True

    def _close(self) -> None:
        self.give_back()
        self.state = self.begin
