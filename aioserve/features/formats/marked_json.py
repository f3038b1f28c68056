"""A mark and JSON calls behind it: Hermes and Qwen, Granite 3, Nemotron 2, Phi-4, Apriel."""

import re
from collections.abc import Sequence
from typing import ClassVar

from aioserve.features.formats import (
    Beginning,
    CallObject,
    CallParser,
    Function,
    Literal,
    Marks,
    Reply,
    alternatives,
    any_of,
    bare_beginnings,
    match_end,
    object_of,
    repeated,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENING = any_of([_OPEN])


class HermesParser(CallParser):
    """A parser to which what is between the markers and no call is content, markers and all.
    Qwen2.5-Coder leaves the markers out: a reply that is calls and nothing else needs none.
    """

    markers = (_OPEN, _CLOSE)
    reads_bare = True

    @classmethod
    def evidence(cls, template: str) -> str | None:
        # Qwen3-Coder and others write XML between the same markers.
        is_xml = any(tag in template for tag in ("<function=", "<arg_key>", "<invoke name="))
        return _OPEN if _OPEN in template and not is_xml else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        line = literal("\n")
        return "\n".join(
            [
                f"calls: {repeated('marked', line, is_parallel)}",
                f"marked: {literal(_OPEN)} unmarked",
                f"unmarked: {line} call {line} {literal(_CLOSE)}",
                alternatives(functions, ("name", "arguments"), literal),
            ]
        )

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(_OPEN), "unmarked"), *bare_beginnings(functions)]

    @classmethod
    def write(cls, reply: Reply) -> str:
        calls = [f"{_OPEN}\n{object_of(call)}\n{_CLOSE}" for call in reply.calls]
        return "\n".join([*filter(None, [reply.content]), *calls])

    def begin(self) -> bool:
        return self.read_content(_OPENING, self._open)

    def _open(self) -> bool:
        self.object = CallObject()
        self.state = self._read_call
        return True

    def _read_call(self) -> bool:
        return self.read_object(then=self._close, otherwise=self.begin)

    def _close(self) -> bool:
        if not self.skip_space() or self.skip_end(_CLOSE) is None:
            return False
        self.state = self.begin
        return True


# A mark and JSON calls behind it, in an array or one alone: Granite 3, Nemotron 2, Phi-4, Apriel.
# `<TOOLCALL>[{"name": ..., "arguments": ...}]</TOOLCALL>`, `<|tool_call|>[...]`, `functools[...]`.


_SEPARATORS = re.compile(r"[\s,]*")


class MarkedJsonParser(CallParser):
    """A parser to which what is behind the mark and no call is content, mark and all."""

    #: What begins calls and what ends them, which may be nothing; the first is written.
    marked: ClassVar[tuple[tuple[str, str], ...]]
    #: What stands in a chat template of a model that writes so.
    signs: ClassVar[tuple[str, ...]]
    #: Between content and calls.
    before_calls: ClassVar[str] = ""

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return next((sign for sign in cls.signs if sign in template), None)

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        array = f"{repeated('call', literal(', '), is_parallel)} {literal(']')}"
        rules = [f"array: {literal('[')} opened", f"opened: {array}"]
        for i, (opening, closing) in enumerate(cls.marked):
            rest = "opened" if opening.endswith("[") else "array"
            rules.append(f"block_{i}: {rest} {literal(closing)}".rstrip())
        calls = " | ".join(f"{literal(each[0])} block_{i}" for i, each in enumerate(cls.marked))
        called = alternatives(functions, ("name", "arguments"), literal)
        return "\n".join([f"calls: {calls}", *rules, called])

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(each[0]), f"block_{i}") for i, each in enumerate(cls.marked)]

    @classmethod
    def write(cls, reply: Reply) -> str:
        if not reply.calls:
            return reply.content
        opening, closing = cls.marked[0]
        calls = f"{opening}[{', '.join(map(object_of, reply.calls))}]{closing}"
        return f"{reply.content}{cls.before_calls}{calls}" if reply.content else calls

    def begin(self) -> bool:
        return self.read_content(any_of([opening for opening, _ in self.marked]), self._open)

    def _open(self) -> bool:
        self._has_called = False
        if self.marker.endswith("["):
            self.state = self._next
            return True
        if not self.skip_space():
            return False
        if self.text[self.at] == "[":
            self.take(self.at + 1)
            self.state = self._next
        else:
            self._begin_call(is_last=True)
        return True

    def _next(self) -> bool:
        """Read another call of an array, or its end."""
        self.take(match_end(_SEPARATORS, self.text, self.at))
        if self.at == len(self.text):
            return False
        if self.text[self.at] == "]" and self._has_called:
            self.take(self.at + 1)
            self.held = None
            self.state = self._close
        else:
            self._begin_call(is_last=False)
        return True

    def _begin_call(self, *, is_last: bool) -> None:
        if self.text[self.at] == "{":
            self.object, self._is_alone = CallObject(), is_last
            self.state = self._read_call
        else:
            self.give_back()
            self.state = self.begin

    def _read_call(self) -> bool:
        return self.read_object(then=self._after_call, otherwise=self.begin)

    def _after_call(self) -> bool:
        self._has_called = True
        if not self._is_alone:
            self.hold()
        self.state = self._close if self._is_alone else self._next
        return True

    def _close(self) -> bool:
        closing = dict(self.marked)[self.marker]
        if closing and (not self.skip_space() or self.skip_end(closing) is None):
            return False
        self.state = self.begin
        return True


class GraniteParser(MarkedJsonParser):
    """Granite 3; Granite 4 writes as Hermes does."""

    marked = (("<|tool_call|>", ""), ("<tool_call>", ""))
    signs = ("<|tool_call|>",)
    markers = ("<|tool_call|>", "<tool_call>")


class NemotronParser(MarkedJsonParser):
    """Nemotron Nano 2, and the Llamas that Nvidia has made of it."""

    marked = (("<TOOLCALL>", "</TOOLCALL>"),)
    signs = ("<TOOLCALL>",)
    markers = marked[0]
    before_calls = "\n"


class AprielParser(MarkedJsonParser):
    """Apriel 1.5 and 1.6, which tell their reasoning by a sentence before it and one behind it."""

    marked = (("<tool_calls>", "</tool_calls>"),)
    signs = ("<tool_calls>[",)
    markers = marked[0]
    before_calls = "\n"
    marks = Marks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")


class Phi4Parser(MarkedJsonParser):
    """Phi-4-mini, in its own marks and in those that other templates teach it."""

    marked = (("<|tool_call|>", "<|/tool_call|>"), ("functools[", ""))
    signs = ("<|/tool_call|>", "<|/tool|>", "functools[")
    markers = (*marked[0], "functools[")

    @classmethod
    def evidence(cls, template: str) -> str | None:
        # firefunction's template, which asks for the same, is told of tools by another name.
        return None if "<|start_header_id|>" in template else super().evidence(template)
