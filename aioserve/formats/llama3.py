"""Llama 3: `{"name": ..., "parameters": ...}`, alone, after `<|python_tag|>`, or joined by `;`.

Without the tag a reply is calls from its beginning or not at all; after it, anywhere.
"""

from collections.abc import Sequence

from aioserve.formats.call_object import CallObject
from aioserve.formats.call_parser import (
    Beginning,
    Function,
    Literal,
    alternatives,
    any_of,
    repeated,
)
from aioserve.formats.plain_json import PlainJsonParser

_TAG = "<|python_tag|>"
_TAGGED = any_of([_TAG])
# In templates of models that were made of Llama 3 and call in ways of their own: functionary's,
# firefunction's.
_OTHERS = ("<function=", ">>>", "functools")


class Llama3Parser(PlainJsonParser):
    """As plain JSON, and the tag makes any name a call."""

    markers = (_TAG,)

    @classmethod
    def fits(cls, template: str) -> bool:
        if any(sign in template for sign in _OTHERS):
            return False
        return _TAG in template or ("<|start_header_id|>" in template and "tools" in template)

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        calls = repeated("call", literal("; "), is_parallel)
        return f"calls: {calls}\n" + alternatives(functions, ("name", "parameters"), literal)

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal(_TAG), "call"), *super().beginnings(functions, literal)]

    def _rest(self) -> bool:
        return self._read_content(_TAGGED, self._after_tag)

    def _after_tag(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[self._at] == "{":
            self._object = CallObject()
            self._state = self._read_call
        else:
            self._close()
        return True
