"""A reply that is calls as JSON and nothing else, or behind a tag: plain JSON, Llama 3, Llama 4."""

import re
from collections.abc import Sequence

from aioserve.features.formats import (
    ARGUMENT_KEYS,
    Beginning,
    CallObject,
    CallParser,
    Function,
    Literal,
    Reply,
    alternatives,
    any_of,
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
    """A parser of calls without marks: the first character that is no space decides whether there
    are any; for the next call, what follows one.
    """

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

    @classmethod
    def evidence(cls, template: str) -> str | None:
        if any(sign in template for sign in _OTHERS):
            return None
        if _TAG in template:
            return _TAG
        return _HEADER if _HEADER in template and "tools" in template else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        calls = repeated("call", literal("; "), is_parallel)
        return f"calls: {calls}\n" + alternatives(functions, ("name", "parameters"), literal)

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(_TAG), "call"), *super().beginnings(functions, literal)]

    @classmethod
    def write(cls, reply: Reply) -> str:
        calls = "; ".join(object_of(call, "parameters") for call in reply.calls)
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

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return _HEADER_4 if _HEADER_4 in template and "tools" in template else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        calls = repeated("call", literal(""), is_parallel)
        return f"calls: {calls}\n" + alternatives(functions, ("name", "parameters"), literal)

    @classmethod
    def write(cls, reply: Reply) -> str:
        if reply.content and reply.calls:
            raise ValueError("a reply is either content or calls")
        return reply.content or "".join(object_of(call, "parameters") for call in reply.calls)
