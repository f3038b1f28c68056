"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, anywhere in a text."""

from collections.abc import Sequence

from aioserve.formats.call_object import CallObject
from aioserve.formats.call_parser import (
    Beginning,
    CallParser,
    Function,
    Literal,
    alternatives,
    any_of,
    repeated,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENING = any_of([_OPEN])


class HermesParser(CallParser):
    """What is between the markers and no call is content, markers and all."""

    markers = (_OPEN, _CLOSE)

    @classmethod
    def fits(cls, template: str) -> bool:
        # Qwen3-Coder and others write XML between the same markers.
        return _OPEN in template and "<function=" not in template and "<arg_key>" not in template

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
        return [Beginning(literal(_OPEN), "unmarked")]

    def _begin(self) -> bool:
        return self._read_content(_OPENING, self._open)

    def _open(self) -> bool:
        self._object = CallObject()
        self._state = self._read_call
        return True

    def _read_call(self) -> bool:
        return self._read_object(then=self._close, otherwise=self._begin)

    def _close(self) -> bool:
        if not self._skip_space() or self._skip_end(_CLOSE) is None:
            return False
        self._state = self._begin
        return True
