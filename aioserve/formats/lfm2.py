"""LFM2: `<|tool_call_start|>[f(a=1, b="x")]<|tool_call_end|>`, calls as Python writes them."""

from aioserve.formats import Marks
from aioserve.formats.noted_calls import NotedCallParser

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
