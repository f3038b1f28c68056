"""Llama 3: `{"name": ..., "parameters": ...}`, alone, after `<|python_tag|>`, or joined by `;`.

Without the tag a reply is calls from its beginning or not at all; after it, anywhere.
"""

from collections.abc import Sequence

from aioserve.formats import (
    Beginning,
    CallObject,
    Function,
    Literal,
    Reply,
    alternatives,
    any_of,
    object_of,
    repeated,
)
from aioserve.formats.plain_json import PlainJsonParser

_TAG = "<|python_tag|>"
_TAGGED = any_of([_TAG])
_HEADER = "<|start_header_id|>"
# In templates of models that were made of Llama 3 and call in ways of their own: functionary's,
# firefunction's.
_OTHERS = ("<function=", ">>>", "functools")


class Llama3Parser(PlainJsonParser):
    """As plain JSON, and the tag makes any name a call."""

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
