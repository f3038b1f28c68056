"""The wire structs of OpenAI's Responses API: requests, answers, and the events of a stream.

Requests refuse unknown fields, as in `protocol`. Knows nothing about HTTP or the engine.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aioserve.engine.chat.tools import FunctionDefinition
from aioserve.errors import RequestError
from aioserve.params import MAX_LOGPROBS, SamplingDefaults, SamplingParams, StructuredOutputs
from aioserve.server.protocol import (
    ChatTokenLogprob,
    Empty,
    Int,
    RequestPart,
    SamplingRequest,
    Usage,
)


class InputPart(RequestPart, kw_only=True, omit_defaults=True):
    """One part of a message, of a call's output or of reasoning: a text or an image."""

    type: str
    text: str | None = None
    # Of images.
    image_url: str | None = None
    # Hints: the model's own processor has the say, and what a reply told besides its text.
    detail: Any = None
    annotations: Any = None
    logprobs: Any = None
    # Of other types; not served.
    file_data: Empty = None
    file_id: Empty = None
    file_url: Empty = None
    filename: Empty = None
    input_audio: Empty = None
    refusal: Empty = None


class InputItem(RequestPart, kw_only=True, omit_defaults=True):
    """What was said, called, answered or thought; its type says which fields it has."""

    type: str | None = None  # default message
    # Labels of what a response had.
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    # Of message, and content of reasoning.
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    # Of function_call.
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None  # a JSON object, as text
    namespace: str | None = None  # of the function, if it is in one
    # Of custom_tool_call, beside call_id and name.
    input: str | None = None
    # Of function_call_output and custom_tool_call_output, beside call_id.
    output: str | list[InputPart] | None = None
    # Of reasoning.
    summary: list[InputPart] | None = None
    encrypted_content: Any = None  # a hint: only its vendor can read it
    caller: Any = None  # a hint
    action: Any = None  # of web_search_call, which is passed over: what was looked for


class FunctionTool(FunctionDefinition, kw_only=True, omit_defaults=True):
    """A function among `tools`, or in a namespace."""

    type: Literal["function"]
    # Hints: every function is told to the model at once.
    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None


class CustomTool(RequestPart, kw_only=True, omit_defaults=True):
    """A custom tool among `tools`, or in a namespace: its input is any text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None  # a grammar, which the model is told of
    # Hints, as of functions.
    allowed_callers: Any = None
    defer_loading: Any = None


class NamespaceTool(RequestPart, kw_only=True, omit_defaults=True):
    """A namespace among `tools`: functions that have a name in common."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[dict[str, Any]]  # `FunctionTool` or `CustomTool`


#: A `FunctionTool`, a `NamespaceTool`, or one that only a vendor runs, whose fields are its own.
ToolEntry = Annotated[
    dict[str, Any],
    Meta(description="A tool: of type function, custom or namespace; or one of a vendor's."),
]


class ToolName(RequestPart, kw_only=True):
    """A function or custom tool that the model may call, by name."""

    type: Literal["function", "custom"]
    name: str


class FunctionChoice(RequestPart, kw_only=True, omit_defaults=True):
    """A `tool_choice` that forces a call of one function, or allows those of some."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None  # of a function or custom tool
    # Of allowed_tools.
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolName] | None = None


class TextFormat(RequestPart, kw_only=True, omit_defaults=True):
    """The format of the text; a JSON schema is kept to, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def structured_outputs(self) -> StructuredOutputs | None:
        """Return what it asks for. Raises `RequestError` for parts that are missing or out of
        place.
        """
        for name in ("name", "schema"):
            is_given = getattr(self, name) is not None
            if is_given != (self.type == "json_schema"):
                verb = "takes no" if is_given else "needs"
                raise RequestError(
                    f"text.format of type {self.type} {verb} {name}", param=f"text.format.{name}"
                )
        if self.type == "json_object":
            return StructuredOutputs(json_object=True)
        return None if self.schema is None else StructuredOutputs(json=self.schema)


class TextConfig(RequestPart, kw_only=True, omit_defaults=True):
    """The format and the verbosity of the text of a reply."""

    format: TextFormat | None = None
    verbosity: str | None = None  # a hint, where the chat template looks at it


class ReasoningConfig(RequestPart, kw_only=True, omit_defaults=True):
    """How much the model thinks, and whether that is told as a summary; all of it is told."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Any = None  # any but null: told as a summary
    generate_summary: Any = None  # its older name
    # Hints: the template has the say which reasoning the model sees again.
    context: Any = None
    mode: Any = None
    max_tokens: Int | None = None  # extension, as at OpenRouter: the thinking budget


_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(SamplingRequest, kw_only=True, omit_defaults=True):
    """The JSON body of POST /v1/responses: input items, and how to answer them."""

    input: str | list[InputItem]
    chat_template_kwargs: dict[str, Any] | None = None  # what else the template looks at
    include: list[str] | None = None  # a hint, but for logprobs of messages
    instructions: str | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None  # of OpenAI's own tools
    metadata: dict[str, str] | None = None  # comes back
    parallel_tool_calls: bool | None = None  # false: at most one call in a response
    previous_response_id: str | None = None
    reasoning: ReasoningConfig | None = None
    store: bool | None = None  # default true
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    thinking_token_budget: Int | None = None  # as in vLLM: reasoning tokens; -1: any number
    tools: list[ToolEntry] | None = None
    top_logprobs: Int | None = None  # alternatives per token of a message, up to 20
    truncation: Literal["auto", "disabled"] | None = None  # auto: as truncate_prompt_tokens -1

    @property
    def bound_by(self) -> str | None:
        """The field that the text is bound by, if it is another than `structured_outputs`."""
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        return "text.format" if form.schema is None else "text.format.schema"

    def sampling_params(
        self, defaults: SamplingDefaults, default_max_tokens: int | None
    ) -> SamplingParams:
        """Return the request's sampling parameters; what it leaves open is taken from `defaults`,
        its length from `default_max_tokens` if these have none. Raises `RequestError` that names
        the field.
        """
        form = None if self.text is None else self.text.format
        others: dict[str, Any] = {}
        if self.truncation == "auto" and self.truncate_prompt_tokens is None:
            others["truncate_prompt_tokens"] = -1
        return self.make_params(
            self.max_output_tokens,
            defaults,
            default_max_tokens,
            wanted=None if form is None else form.structured_outputs(),
            wanted_by="text.format",
            logprobs=self._num_logprobs(),
            **others,
        )

    def _num_logprobs(self) -> int | None:
        """Alternatives that are told of each token of a message; None: no logprobs are."""
        top, is_wanted = self.top_logprobs or 0, _LOGPROBS in (self.include or ())
        if not 0 <= top <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}",
                param="top_logprobs",
            )
        if top and not is_wanted:
            raise RequestError(f"top_logprobs needs {_LOGPROBS!r} in include", param="top_logprobs")
        return top if is_wanted else None

    def reasoning_budget(self) -> tuple[int | None, str]:
        """Return how many reasoning tokens there may be, and the field that says so. Raises
        `RequestError` for two fields that differ.
        """
        own = self.thinking_token_budget
        given = None if self.reasoning is None else self.reasoning.max_tokens
        if given is None:
            return own, "thinking_token_budget"
        if own not in (None, given):
            raise RequestError(
                "thinking_token_budget and reasoning.max_tokens are two names of one limit; they "
                "differ",
                param="thinking_token_budget",
            )
        return given, "reasoning.max_tokens"


class Whole(RequestPart, kw_only=True):
    """The query parameters of GET /v1/responses/{id}, which asks for a whole response."""

    stream: bool = False  # true is refused


class Page(RequestPart, kw_only=True):
    """The query parameters of GET /v1/responses/{id}/input_items: which page of the items."""

    after: str | None = None  # an id: what comes then
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


# The wire structs of answers of OpenAI's Responses API: the response, its items and its usage.
# Knows nothing about HTTP or the engine.


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


# The events of a streamed response, as OpenAI's Responses API numbers them. Each is a wire struct.
# Knows nothing about HTTP or how a response comes about.


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
