"""How events tell the text of an output item: their names, and the part of the item that it is.

Reasoning is told as a summary, and whole, to a client that asks for one. Knows no stream.
"""

from collections.abc import Mapping
from typing import NamedTuple

from aioserve.server.responses.protocol import ResponsesRequest
from aioserve.server.responses.response import (
    CustomCallItem,
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummarizedItem,
    SummaryText,
)

Part = OutputText | ReasoningText | SummaryText


class Parts(NamedTuple):
    """The list of an item whose one part is its text."""

    field: str  # of the item
    index_field: str  # of events, says which part
    events: str  # the name of events that begin and end a part
    part: type[Part]


class ItemText(NamedTuple):
    """What tells the text of an item."""

    events: str  # the name of events with the text, or with pieces of it
    parts: Parts | None  # None: calls have no parts


_TEXTS: Mapping[type[OutputItem], ItemText] = {
    OutputMessage: ItemText(
        "output_text", Parts("content", "content_index", "content_part", OutputText)
    ),
    ReasoningItem: ItemText(
        "reasoning_text", Parts("content", "content_index", "content_part", ReasoningText)
    ),
    SummarizedItem: ItemText(
        "reasoning_summary_text",
        Parts("summary", "summary_index", "reasoning_summary_part", SummaryText),
    ),
    FunctionCallItem: ItemText("function_call_arguments", None),
    CustomCallItem: ItemText("custom_tool_call_input", None),
}


def text_of(item: OutputItem) -> ItemText:
    """How the text of this item is told."""
    return _TEXTS[type(item)]


def reasoning_kind(body: ResponsesRequest) -> type[ReasoningItem]:
    """The kind of item that reasoning is told in."""
    asked = body.reasoning and (body.reasoning.summary or body.reasoning.generate_summary)
    return SummarizedItem if asked else ReasoningItem
