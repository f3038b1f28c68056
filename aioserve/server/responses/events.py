"""The events of a streamed response, as OpenAI's Responses API numbers them.

Each is a wire struct. Knows nothing about HTTP or how a response comes about.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from aioserve.server.logprob_structs import ChatTokenLogprob
from aioserve.server.responses.response import (
    OutputItem,
    OutputText,
    ReasoningText,
    Response,
    SummaryText,
)


class Numbered(msgspec.Struct, kw_only=True):
    """Base of the events of a stream, which are numbered."""

    type: str
    sequence_number: int


class ResponseEvent(Numbered, kw_only=True):
    """The status of the whole response has changed."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete"
    ]
    response: Response


class ItemEvent(Numbered, kw_only=True):
    """The event with which an output item begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class OfItem(Numbered, kw_only=True):
    """Base of events of what is in an item; calls have no parts."""

    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET  # of reasoning that is told as a summary


class PartEvent(OfItem, kw_only=True):
    """The event with which the text of an item begins or ends."""

    type: Literal[
        "response.content_part.added",
        "response.content_part.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
    ]
    part: OutputText | ReasoningText | SummaryText


class DeltaEvent(OfItem, kw_only=True):
    """More text of an item, or more arguments of a call."""

    type: Literal[
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
    ]
    delta: str
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET  # of a message


class DoneEvent(OfItem, kw_only=True):
    """The whole text of an item, or all arguments of a call."""

    type: Literal[
        "response.output_text.done",
        "response.reasoning_text.done",
        "response.reasoning_summary_text.done",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.done",
    ]
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class ErrorEvent(Numbered, kw_only=True):
    """The last event of a stream that failed."""

    type: Literal["error"] = "error"
    code: str | None
    message: str
    param: str | None
