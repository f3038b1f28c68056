"""Llama 4: `[f(a=1), g(b="x")]` as Python writes it, or JSON as Llama 3, as its template says.

Without marks a reply is calls from its beginning or not at all; after `<|python_start|>`, anywhere.
"""

import re
from collections.abc import Sequence

from aioserve.formats import (
    Beginning,
    Function,
    Literal,
    Reply,
    alternatives,
    any_of,
    object_of,
    repeated,
)
from aioserve.formats.llama3 import Llama3Parser
from aioserve.formats.notation import PYTHON
from aioserve.formats.noted_calls import NotedCallParser
from aioserve.formats.noted_grammar import noted_rules

_START, _END = "<|python_start|>", "<|python_end|>"
_HEADER = "<|header_start|>"
_EXAMPLE = re.compile(r"\[func_name1\(\w+=\w+")  # how templates tell the model


class Llama4PythonicParser(NotedCallParser):
    """Of Llama 3.2 and others, too, whose templates ask for such calls."""

    notation = PYTHON._replace(quote='"')
    marked = (_START, _END)
    markers = marked

    @classmethod
    def evidence(cls, template: str) -> str | None:
        found = _EXAMPLE.search(template)
        return found.group() if found else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        calls = [f"{literal(each.name)} arguments_{i}" for i, each in enumerate(functions)]
        return "\n".join(
            [
                f'calls: "[" {repeated("call", literal(", "), is_parallel)} "]"',
                f'block: "[" call more {literal(_END)}?',
                'more: (", " call)* "]"',
                f"call: {' | '.join(calls)}",
                *noted_rules(cls.notation, functions, literal),
            ]
        )

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        """The mark, and without it a list that begins with the name of a tool."""
        bare = [
            Beginning(rf"/\s*\[\s*{re.escape(each.name)}\(/", f"opened_{i} more", has_text=False)
            for i, each in enumerate(functions)
        ]
        return [Beginning(literal(_START), "block"), *bare]

    @classmethod
    def write(cls, reply: Reply) -> str:
        if not reply.calls:
            return reply.content
        block = cls.block(reply)
        if reply.content:
            return reply.content + block
        return block.removeprefix(_START).removesuffix(_END)

    def begin(self) -> bool:
        """Calls without a mark, or anything else."""
        self.hold()
        self.state = self._first
        return True

    def _first(self) -> bool:
        if not self.skip_space():
            return False
        if self.text[self.at] == "[":
            self.take(self.at + 1)
            self._has_called = False
            self.state = self._next
        else:
            self._give_up()
        return True

    def is_called(self, name: str) -> bool:
        return name in self.functions if self.marker == "" else name != ""

    def rest(self) -> bool:
        return self.read_content(any_of(self.marked[:1]), self._open)


class Llama4JsonParser(Llama3Parser):
    """Calls as those of Llama 3, one right behind the other."""

    has_text_before = False

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return _HEADER if _HEADER in template and "tools" in template else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        calls = repeated("call", literal(""), is_parallel)
        return f"calls: {calls}\n" + alternatives(functions, ("name", "parameters"), literal)

    @classmethod
    def write(cls, reply: Reply) -> str:
        if reply.content and reply.calls:
            raise ValueError("a reply is either content or calls")
        return reply.content or "".join(object_of(call, "parameters") for call in reply.calls)
