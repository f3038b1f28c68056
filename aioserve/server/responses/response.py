"""The wire structs of answers of OpenAI's Responses API: the response, its items and its usage.

Knows nothing about HTTP or the engine.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from aioserve.server.logprob_structs import ChatTokenLogprob
from aioserve.server.protocol import Usage
from aioserve.server.responses.protocol import (
    FunctionChoice,
    InputItem,
    ReasoningConfig,
    TextConfig,
)


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message, as a part of its content."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning, as a part of its content."""

    text: str = ""


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """The text of reasoning, as a part of its summary."""

    text: str = ""


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """An output item with the text of the reply."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """An output item with the reasoning of the model: as content, or as a summary."""

    id: str
    status: Status = "in_progress"
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []


class SummarizedItem(ReasoningItem, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning that is told as a summary."""


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """An output item with a call of a function."""

    id: str
    status: Status = "in_progress"
    call_id: str  # what its output must name
    name: str
    namespace: str | UnsetType = UNSET  # of the function, if it is in one
    arguments: str = ""


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """An output item with a call of a custom tool."""

    id: str
    status: Status = "in_progress"
    call_id: str  # what its output must name
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


CallItem = FunctionCallItem | CustomCallItem
OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class InputDetails(msgspec.Struct, kw_only=True):
    """How many tokens of the prompt were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """How many of the output tokens are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Counts of a response's input and output tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """Convert the usage of a chat completion to that of a response."""
        details, output = usage.prompt_tokens_details, usage.completion_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=details.cached_tokens if details else 0
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(
                reasoning_tokens=output.reasoning_tokens if output else 0
            ),
            total_tokens=usage.total_tokens,
        )


class Incomplete(msgspec.Struct, kw_only=True):
    """The reason for which a response is incomplete."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """Response of /v1/responses, and what its events carry."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    background: bool = False
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningConfig | None
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class InputTokens(msgspec.Struct, kw_only=True):
    """The response of POST /v1/responses/input_tokens: how many tokens the prompt has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Deleted(msgspec.Struct, kw_only=True):
    """The response of DELETE /v1/responses/{id}: the response is not stored any more."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """The response of GET /v1/responses/{id}/input_items: one page of the input."""

    object: Literal["list"] = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
