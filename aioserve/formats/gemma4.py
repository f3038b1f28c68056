"""Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>`, one mark for each call."""

from collections.abc import Sequence

from aioserve.formats import Function, Literal, Marks, Reply, repeated
from aioserve.formats.notation import GEMMA
from aioserve.formats.noted_calls import NotedCallParser


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
