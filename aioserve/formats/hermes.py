"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, anywhere in a text."""

from collections.abc import Sequence

from aioserve.formats import (
    Beginning,
    CallObject,
    CallParser,
    Function,
    Literal,
    Reply,
    alternatives,
    any_of,
    bare_beginnings,
    object_of,
    repeated,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENING = any_of([_OPEN])


class HermesParser(CallParser):
    """What is between the markers and no call is content, markers and all. Qwen2.5-Coder leaves the
    markers out: a reply that is calls and nothing else needs none.
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
