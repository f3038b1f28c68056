"""Calls between marks with arguments in a notation that is no JSON: `<mark>[f(a=1)]</mark>`.

The base, and the formats of Gemma 4, LFM2, Olmo 3 and Llama 4.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

from aioserve.features.formats import (
    Arguments,
    Beginning,
    Call,
    CallObject,
    CallParser,
    Function,
    Literal,
    Marks,
    Reply,
    any_of,
    match_end,
    repeated,
)
from aioserve.features.formats.notation import (
    GEMMA,
    PYTHON,
    Notation,
    NotedArguments,
    noted_arguments,
)
from aioserve.features.formats.noted_grammar import noted_rules

_NAME = re.compile(r"[\w.\-]*")
_SEPARATORS = re.compile(r"[\s,]*")


class NotedCallParser(CallParser):
    """A parser of calls between marks, where objects with a name and arguments are calls, too."""

    notation: ClassVar[Notation] = PYTHON
    #: What begins and ends calls.
    marked: ClassVar[tuple[str, str]]
    #: What stands around all calls between the marks, and between two of them.
    listed: ClassVar[tuple[str, str, str]] = ("[", ", ", "]")
    before_name: ClassVar[str] = ""

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return cls.marked[0] if cls.marked[0] in template else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        opening, separator, closing = cls.listed
        each = " | ".join(
            f"{literal(function.name)} arguments_{i}" for i, function in enumerate(functions)
        )
        return "\n".join(
            [
                f"calls: {literal(cls.marked[0])} block",
                f"block: {literal(opening)} {repeated('call', literal(separator), is_parallel)} "
                f"{literal(closing)} {literal(cls.marked[1])}",
                f"call: {literal(cls.before_name)} ({each})",
                *noted_rules(cls.notation, functions, literal),
            ]
        )

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(cls.marked[0]), "block")]

    @classmethod
    def write(cls, reply: Reply) -> str:
        return reply.content + cls.block(reply)

    @classmethod
    def block(cls, reply: Reply) -> str:
        """Return all calls of a reply, with their marks."""
        if not reply.calls:
            return ""
        opening, separator, closing = cls.listed
        calls = separator.join(
            f"{cls.before_name}{call.name}{noted_arguments(cls.notation, call.arguments)}"
            for call in reply.calls
        )
        return f"{cls.marked[0]}{opening}{calls}{closing}{cls.marked[1]}"

    def begin(self) -> bool:
        self.state = self.rest
        return True

    def rest(self) -> bool:
        """State outside of calls: content, up to the mark that begins calls."""
        return self.read_content(any_of(self.marked[:1]), self._open)

    def _open(self) -> bool:
        if not self.skip_space():
            return False
        if self.text[self.at] == "[":
            self.take(self.at + 1)
        self._has_called = False
        self.state = self._next
        return True

    def _next(self) -> bool:
        """Read another call, or the end of the calls."""
        self.take(match_end(_SEPARATORS, self.text, self.at))
        if self.at == len(self.text):
            return False
        is_end = self.skip_end(self.marked[1])
        if is_end is None:
            return False
        is_list_end = not is_end and self.text[self.at] == "]"
        if (is_end or is_list_end) and not self._has_called:
            self._give_up()
        elif is_end:
            self.held = None
            self.state = self.rest
        elif is_list_end:
            self.take(self.at + 1)
            self.held = None
            self.state = self._close
        elif self.text[self.at] == "{" and self.marker:
            self.object = CallObject()
            self.state = self._read_call
        else:
            self._name: list[str] = []
            self.state = self._before_name
        return True

    def _close(self) -> bool:
        if not self.skip_space() or self.skip_end(self.marked[1]) is None:
            return False
        self.state = self.rest
        return True

    def _read_call(self) -> bool:
        return self.read_object(then=self._after_call, otherwise=self.rest)

    def _after_call(self) -> bool:
        self._has_called = True
        self.hold()
        self.state = self._next
        return True

    def _before_name(self) -> bool:
        found = self.skip(self.before_name)
        if found is not None:
            self.state = self._read_name if found else self._give_up
        return found is not None

    def _read_name(self) -> bool:
        self._name.append(self.take(match_end(_NAME, self.text, self.at)))
        if self.at == len(self.text):
            return False
        name = "".join(self._name)
        if self.text[self.at] != self.notation.arguments[0] or not self.is_called(name):
            return self._give_up()
        self.take(self.at + 1)
        self.tell([Call(name)])
        function = self.functions.get(name)
        self._noted = NotedArguments(self.notation, function.parameters if function else {})
        self.state = self._read_noted
        return True

    def is_called(self, name: str) -> bool:
        """Return whether what stands before arguments is a name."""
        return name != ""

    def _read_noted(self) -> bool:
        noted = self._noted
        self.take(noted.feed(self.text, self.at, self.is_last))
        told, noted.told = "".join(noted.told), []
        if told:
            self.events.append(Arguments(told))
        if noted.is_done:
            self.state = self._after_call
        elif noted.is_broken:
            self.state = self.rest
        return noted.is_done or noted.is_broken

    def _give_up(self) -> bool:
        self.give_back()
        self.state = self.rest
        return True


# Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>`, one mark for each call.


class Gemma4Parser(NotedCallParser):
    """Keys are sorted, as its template writes them."""

    notation = GEMMA
    marked = ("<|tool_call>", "<tool_call|>")
    listed = ("", "", "")
    before_name = "call:"
    marks = Marks("<|channel>thought", "<channel|>")
    markers = (*marked, *GEMMA.quotes, marks.start, "<|channel>", marks.end)

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        one = super().grammar(functions, False, literal)
        marked = f"marked: {literal(cls.marked[0])} block"
        calls = f"calls: {repeated('marked', literal(''), is_parallel)}"
        return "\n".join([calls, marked, one.partition("\n")[2]])

    @classmethod
    def block(cls, reply: Reply) -> str:
        one = super().block
        return "".join(one(Reply(calls=[call])) for call in reply.calls)


# LFM2: `<|tool_call_start|>[f(a=1, b="x")]<|tool_call_end|>`, calls as Python writes them.


# Some of its templates write no call, and tell of the tools alone.
_SIGNS = ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: [")


class Lfm2Parser(NotedCallParser):
    """Objects with a name and arguments are read in the list as well."""

    marked = ("<|tool_call_start|>", "<|tool_call_end|>")
    marks = Marks("<think>", "</think>")
    markers = marked

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return next((sign for sign in _SIGNS if sign in template), None)


# Olmo 3: `<function_calls>` around lines with one call each, as Python writes it.


class Olmo3Parser(NotedCallParser):
    """Its template writes `true`, `false` and `null`, and no content beside calls."""

    notation = PYTHON._replace(words=("true", "false", "null"))
    marked = ("<function_calls>", "</function_calls>")
    listed = ("\n", "\n", "\n")
    markers = marked

    @classmethod
    def write(cls, reply: Reply) -> str:
        return "\n".join(filter(None, [reply.content, cls.block(reply)]))


# Llama 4: `[f(a=1), g(b="x")]` as Python writes it, or JSON as Llama 3, as its template says.
# Without marks a reply is calls from its beginning or not at all; after `<|python_start|>`,
# anywhere.


_START, _END = "<|python_start|>", "<|python_end|>"
_EXAMPLE = re.compile(r"\[func_name1\(\w+=\w+")  # how templates tell the model


class Llama4PythonicParser(NotedCallParser):
    """A parser for Llama 4, and for Llama 3.2 and others, whose templates ask for such calls."""

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
        """Return the mark, and without it a list that begins with the name of a tool."""
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
