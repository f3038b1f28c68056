"""Formats of models that write calls as JSON: between marks, behind names, or bare."""

import re
import secrets
import string
from collections.abc import Sequence
from typing import ClassVar

from aioserve.features.formats import (
    ARGUMENT_KEYS,
    Beginning,
    Call,
    CallObject,
    CallParser,
    Function,
    JsonValue,
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

# A mark and JSON calls behind it: Hermes and Qwen, Granite 3, Nemotron 2, Phi-4, Apriel.


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
    #: Between content and calls.
    before_calls: ClassVar[str] = ""

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


# Mistral: `[TOOL_CALLS]` and an array of calls, or `[TOOL_CALLS]name[ARGS]{...}` for each.


_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.\-]*", re.ASCII)
_ID_CHARACTERS = string.ascii_letters + string.digits
_OWN_ID = re.compile("[a-zA-Z0-9]{9}")


class MistralParser(MarkedJsonParser):
    """Ids are nine letters and digits: its templates refuse others when they come back."""

    marked = ((_CALLS, ""),)
    signs = (_CALLS,)
    markers = (_CALLS, _ARGS, _ID)

    @staticmethod
    def make_id() -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        named = [
            f"{literal(function.name)} {literal(_ARGS)}? arguments_{i}"
            for i, function in enumerate(functions)
        ]
        return [Beginning(literal(_CALLS), f"(array | {' | '.join(named)})")]

    def _open(self) -> bool:
        is_open = super()._open()
        self._has_called = True  # an array without calls is no content
        return is_open

    def _begin_call(self, *, is_last: bool) -> None:
        if is_last:  # a name, in no array
            self._name: list[str] = []
            self._id: list[str] = []
            self.state = self._read_name
        else:
            super()._begin_call(is_last=False)

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
            self.give_back()
            self.state = self.begin
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


# A reply that is calls as JSON and nothing else, or behind a tag: plain JSON, Llama 3, Llama 4.


_PLAIN_SEPARATORS = re.compile(r"[\s,;]*")

# In patterns of a grammar.
_SPACE = r"[ \t\r\n]{0,20}"
_BEGINNING = r'/[ \t\r\n,;\[\]]*\{_("type"_:_"function"_,_)?"name"_:_"NAME"_,_"(KEYS)"_:/'.replace(
    "_", _SPACE
).replace("KEYS", "|".join(ARGUMENT_KEYS))


class PlainJsonParser(CallParser):
    """A parser of calls without marks: the first character that is no space decides whether there
    are any; for the next call, what follows one. No template shows that its model writes so.
    """

    signs = ()
    has_text_before = False

    def __init__(self, functions: Sequence[Function], prompt_end: str = "") -> None:
        super().__init__(functions, prompt_end)
        self._is_array = False

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
        """Return an object that begins with the name of a tool: what has no mark may also be an
        answer.
        """
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
        self.take(match_end(_PLAIN_SEPARATORS, self.text, self.at))  # no content
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


# Llama 3: `{"name": ..., "parameters": ...}`, alone, after `<|python_tag|>`, or joined by `;`.
# Without the tag a reply is calls from its beginning or not at all; after it, anywhere.


_TAG = "<|python_tag|>"
_TAGGED = any_of([_TAG])
_HEADER = "<|start_header_id|>"
_HEADER_4 = "<|header_start|>"  # of Llama 4
# In templates of models that were made of Llama 3 and call in ways of their own: functionary's,
# firefunction's.
_OTHERS = ("<function=", ">>>", "functools")


class Llama3Parser(PlainJsonParser):
    """A parser of plain JSON to which the tag makes any name a call."""

    markers = (_TAG,)
    has_text_before = True
    separator: ClassVar[str] = "; "  # between calls that are written

    @classmethod
    def evidence(cls, template: str) -> str | None:
        if any(sign in template for sign in _OTHERS):
            return None
        if _TAG in template:
            return _TAG
        return _HEADER if _HEADER in template and "tools" in template else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        calls = repeated("call", literal(cls.separator), is_parallel)
        return f"calls: {calls}\n" + alternatives(functions, ("name", "parameters"), literal)

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(_TAG), "call"), *super().beginnings(functions, literal)]

    @classmethod
    def write(cls, reply: Reply) -> str:
        calls = cls.separator.join(object_of(call, "parameters") for call in reply.calls)
        return reply.content + (_TAG if reply.content and calls else "") + calls

    def _rest(self) -> bool:
        return self.read_content(_TAGGED, self._after_tag)

    def _after_tag(self) -> bool:
        if not self.skip_space():
            return False
        if self.text[self.at] == "{":
            self.object = CallObject()
            self.state = self._read_call
        else:
            self._close()
        return True


class Llama4JsonParser(Llama3Parser):
    """Calls as those of Llama 3, one right behind the other."""

    has_text_before = False
    separator = ""

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return _HEADER_4 if _HEADER_4 in template and "tools" in template else None

    @classmethod
    def write(cls, reply: Reply) -> str:
        if reply.content and reply.calls:
            raise ValueError("a reply is either content or calls")
        return super().write(reply)
