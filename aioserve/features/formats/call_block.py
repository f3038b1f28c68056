"""Blocks of calls between markers, each a header with its name, a marker, and JSON arguments.

The base, and the formats of DeepSeek V3, R1 and V3.1 and of Kimi K2.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from aioserve.engine.chat.reply_format import (
    Arguments,
    Beginning,
    Call,
    Function,
    Literal,
    Reply,
    dumps,
)
from aioserve.engine.chat.reply_grammar import (
    json_rule,
    repeated,
)
from aioserve.features.formats.call_parser import CallParser, unstated_signs
from aioserve.features.formats.text import JsonValue, any_of, match_end

_HEADER = re.compile(r"[^<\n]*")


class CallBlockParser(CallParser):
    """Base of formats that write `BLOCK CALL header SEP {...} CALL_END ... BLOCK_END`.

    A call may also stand without the block around it. A subclass names the markers, says in
    `read_header` what a header means, and in `call_rule` and `written_call` how it writes one.
    """

    #: The markers, in the order in which they are written.
    block: ClassVar[str]
    call: ClassVar[str]
    sep: ClassVar[str]
    call_end: ClassVar[str]
    block_end: ClassVar[str]
    #: What stands between two calls where they are written.
    between: ClassVar[str] = ""
    #: What may stand around the arguments; empty texts where nothing may.
    fences: ClassVar[tuple[str, str]] = ("", "")
    signs = unstated_signs(lambda cls: (cls.block,))
    _opening: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.markers = (cls.block, cls.call, cls.sep, cls.call_end, cls.block_end)
        cls._opening = any_of([cls.block, cls.call])

    @classmethod
    @abstractmethod
    def call_rule(cls, name: str, arguments: str, literal: Literal) -> str:
        """Return the right side of a grammar's rule for what stands between the markers of a call
        of the function `name`; `arguments` is the rule of its arguments.
        """

    @classmethod
    @abstractmethod
    def written_call(cls, name: str, arguments: str, number: int) -> str:
        """Return what stands between the markers of the call `number`, counted from 0, of a
        reply.
        """

    @abstractmethod
    def read_header(self, header: str) -> bool:
        """State behind `sep`, with what stood before it: goes on by `name_call` or `close`."""

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        each = " | ".join(f"call_{i}" for i in range(len(functions)))
        calls = repeated("call", literal(cls.between), is_parallel)
        rules = [
            f"calls: {literal(cls.block)} block",
            f"block: {calls} {literal(cls.block_end)}",
            f"call: {literal(cls.call)} unmarked",
            f"unmarked: ({each}) {literal(cls.call_end)}",
        ]
        for i, function in enumerate(functions):
            rules.append(f"call_{i}: {cls.call_rule(function.name, f'arguments_{i}', literal)}")
            rules.append(f"arguments_{i}: {json_rule(function.parameters)}")
        return "\n".join(rules)

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(cls.block), "block"), Beginning(literal(cls.call), "unmarked")]

    @classmethod
    def write(cls, reply: Reply) -> str:
        calls = [
            f"{cls.call}{cls.written_call(call.name, dumps(call.arguments), i)}{cls.call_end}"
            for i, call in enumerate(reply.calls)
        ]
        block = f"{cls.block}{cls.between.join(calls)}{cls.block_end}" if calls else ""
        return reply.content + block

    def name_call(self, name: str, call_id: str | None = None) -> None:
        """Tell a call, of which the arguments follow."""
        self.tell([Call(name, call_id)])
        self.value = JsonValue()
        self.state = self._before_arguments

    def close(self) -> None:
        """Give back what is no call, and read content again."""
        self.give_back()
        self.state = self.begin

    # States

    def begin(self) -> bool:
        return self.read_content(self._opening, self._open)

    def _open(self) -> bool:
        self._header: list[str] = []
        self.state = self._read_header if self.marker == self.call else self._next
        return True

    def _next(self) -> bool:
        """State in a block, between calls: another call, or the end of the block."""
        if not self.skip_space():
            return False
        is_end = self.skip_end(self.block_end)
        is_call = False if is_end else self.skip(self.call)
        if is_end:
            self.held = None
            self.state = self.begin
        elif is_call:
            self._header = []
            self.state = self._read_header
        elif is_end is None or is_call is None:
            return False
        else:
            self.close()
        return True

    def _read_header(self) -> bool:
        self._header.append(self.take(match_end(_HEADER, self.text, self.at)))
        if self.at == len(self.text):
            return False
        found = self.skip(self.sep)
        if found is None:
            return False
        if found:
            self.state = self._after_sep
        else:
            self.close()
        return True

    def _after_sep(self) -> bool:
        return self.read_header("".join(self._header).strip())

    def _before_arguments(self) -> bool:
        fence = self.fences[0]
        if not self.skip_space() or self.skip_end(fence) is None or not self.skip_space():
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
        fence = self.fences[1]
        if not self.skip_space() or self.skip_end(fence) is None or not self.skip_space():
            return False
        if self.skip_end(self.call_end) is None:
            return False
        self.hold()
        self.state = self._next
        return True


# DeepSeek V3, R1 and V3.1: a block of calls between markers, each a name and its arguments.


def _marker(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"  # a bar of full width


_KIND = "function"  # V3 says it before the name
_FENCE, _FENCE_END = "```json", "```"
_LINE = re.compile(r"[^\n]*")


class DeepSeekV31Parser(CallBlockParser):
    """A parser of both forms: `name<sep>{...}` as V3.1 writes it, and V3's, with the name in a
    line.
    """

    block, block_end = _marker("tool▁calls▁begin"), _marker("tool▁calls▁end")
    call, sep, call_end = map(_marker, ("tool▁call▁begin", "tool▁sep", "tool▁call▁end"))
    fences = (_FENCE, _FENCE_END)

    @classmethod
    def call_rule(cls, name: str, arguments: str, literal: Literal) -> str:
        return f"{literal(name)} {literal(cls.sep)} {arguments}"

    @classmethod
    def written_call(cls, name: str, arguments: str, number: int) -> str:
        return f"{name}{cls.sep}{arguments}"

    def read_header(self, header: str) -> bool:
        if not self.skip_space():
            return False
        if header == _KIND and self.text[self.at] != "{":
            self._line: list[str] = []
            self.state = self._read_name
        else:
            self._begin_call(header)
        return True

    def _read_name(self) -> bool:
        self._line.append(self.take(match_end(_LINE, self.text, self.at)))
        if self.at == len(self.text):
            return False
        self._begin_call("".join(self._line).strip())
        return True

    def _begin_call(self, name: str) -> None:
        if name:
            self.name_call(name)
        else:
            self.close()


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Writes V3's form where a call is forced."""

    between = "\n"

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return super().evidence(template) and (_FENCE if _FENCE in template else None)

    @classmethod
    def call_rule(cls, name: str, arguments: str, literal: Literal) -> str:
        before = literal(f"{name}\n{_FENCE}\n")
        after = literal(f"\n{_FENCE_END}")
        return f"{literal(_KIND)} {literal(cls.sep)} {before} {arguments} {after}"

    @classmethod
    def written_call(cls, name: str, arguments: str, number: int) -> str:
        return f"{_KIND}{cls.sep}{name}\n{_FENCE}\n{arguments}\n{_FENCE_END}"


# Kimi K2: a section of calls, each an id such as `functions.NAME:0` and JSON arguments.


_ID = re.compile(r"(?:functions\.)?(?P<name>[^:]+)(?P<number>:\d+)?")


class KimiK2Parser(CallBlockParser):
    """The id is the model's own: its templates hand it back; it numbers a conversation's calls."""

    block, block_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, sep, call_end = (
        f"<|{name}|>" for name in ("tool_call_begin", "tool_call_argument_begin", "tool_call_end")
    )

    @classmethod
    def call_rule(cls, name: str, arguments: str, literal: Literal) -> str:
        return f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/ {literal(cls.sep)} {arguments}"

    @classmethod
    def written_call(cls, name: str, arguments: str, number: int) -> str:
        return f"functions.{name}:{number}{cls.sep}{arguments}"

    def read_header(self, header: str) -> bool:
        found = _ID.fullmatch(header)
        if found is None:
            self.close()
        else:
            self.name_call(found["name"], header if found["number"] else None)
        return True
