"""DeepSeek V3, R1 and V3.1: a block of calls between markers, each a name and its arguments."""

import re
from collections.abc import Sequence
from typing import ClassVar

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
    def evidence(cls, template: str) -> str | None:
        return _CALLS if _CALLS in template else None

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

    @classmethod
    def write(cls, reply: Reply) -> str:
        calls = [
            f"{_CALL}{cls._written(call.name, dumps(call.arguments))}{_CALL_END}"
            for call in reply.calls
        ]
        block = f"{_CALLS}{cls._between.join(calls)}{_CALLS_END}" if calls else ""
        return reply.content + block

    @classmethod
    def _written(cls, name: str, arguments: str) -> str:
        return f"{name}{_SEP}{arguments}"

    def begin(self) -> bool:
        return self.read_content(_OPENING, self._open)

    def _open(self) -> bool:
        self._header: list[str] = []
        self.state = self._read_header if self.marker == _CALL else self._next
        return True

    def _next(self) -> bool:
        """Another call, or the end of the block."""
        if not self.skip_space():
            return False
        is_end = self.skip_end(_CALLS_END)
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
        """The name, or that it is a function."""
        self._header.append(self.take(match_end(_HEADER, self.text, self.at)))
        if self.at == len(self.text):
            return False
        found = self.skip(_SEP)
        if found is None:
            return False
        if found:
            self.state = self._after_sep
        else:
            self._close()
        return True

    def _after_sep(self) -> bool:
        if not self.skip_space():
            return False
        name = "".join(self._header).strip()
        self._header = []
        if name == _KIND and self.text[self.at] != "{":
            self.state = self._read_name
        else:
            self._call_begins(name)
        return True

    def _read_name(self) -> bool:
        self._header.append(self.take(match_end(_LINE, self.text, self.at)))
        if self.at == len(self.text):
            return False
        self._call_begins("".join(self._header).strip())
        return True

    def _call_begins(self, name: str) -> None:
        if not name:
            self._close()
            return
        self.tell([Call(name)])
        self.value = JsonValue()
        self.state = self._before_arguments

    def _before_arguments(self) -> bool:
        if not self.skip_space() or self.skip_end(_FENCE) is None or not self.skip_space():
            return False
        if self.text[self.at] == "{":
            self.state = self._read_own_arguments
        else:  # a call without any
            self.events.append(Arguments("{}"))
            self.state = self._after_arguments
        return True

    def _read_own_arguments(self) -> bool:
        return self.read_arguments(then=self._after_arguments)

    def _after_arguments(self) -> bool:
        if not self.skip_space() or self.skip_end(_FENCE_END) is None or not self.skip_space():
            return False
        if self.skip_end(_CALL_END) is None:
            return False
        self.hold()
        self.state = self._next
        return True

    def _close(self) -> None:
        self.give_back()
        self.state = self.begin


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Writes V3's form where a call is forced."""

    _between = "\n"

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return super().evidence(template) and (_FENCE if _FENCE in template else None)

    @classmethod
    def _call(cls, name: str, literal: Literal) -> tuple[str, str]:
        before = f"{literal(_KIND)} {literal(_SEP)} {literal(f'{name}{chr(10)}{_FENCE}{chr(10)}')}"
        return before, literal(f"{chr(10)}{_FENCE_END}")

    @classmethod
    def _written(cls, name: str, arguments: str) -> str:
        return f"{_KIND}{_SEP}{name}\n{_FENCE}\n{arguments}\n{_FENCE_END}"
