"""The wire structs of OpenAI's Responses API.

Requests refuse unknown fields, as in `protocol`. Knows nothing about HTTP or the engine.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aioserve.errors import RequestError
from aioserve.hints import Hints
from aioserve.sampling_defaults import SamplingDefaults
from aioserve.sampling_params import SamplingParams
from aioserve.server.chat.protocol import FunctionDefinition
from aioserve.server.protocol import Empty, Int, ModelRequest, RequestPart, Usage
from aioserve.structured_outputs import StructuredOutputs

# Requests


class InputPart(RequestPart, kw_only=True, omit_defaults=True):
    """One part of a message, of a call's output or of reasoning: a text or an image."""

    type: str
    text: str | None = None
    # Of images.
    image_url: str | None = None
    detail: Literal["auto"] | None = None  # the model's own processor has the say
    # Of parts that replies have, or of other types; not served.
    annotations: Empty = None
    file_data: Empty = None
    file_id: Empty = None
    file_url: Empty = None
    filename: Empty = None
    input_audio: Empty = None
    logprobs: Empty = None
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
    # Of function_call_output, beside call_id.
    output: str | list[InputPart] | None = None
    # Of reasoning.
    summary: list[InputPart] | None = None
    # Not served.
    caller: Empty = None
    encrypted_content: Empty = None
    namespace: Empty = None


class FunctionTool(FunctionDefinition, kw_only=True, omit_defaults=True):
    """One of `tools`: what OpenAI runs itself is of other types."""

    type: Literal["function"]
    # Not served.
    allowed_callers: Empty = None
    defer_loading: Empty = None
    output_schema: Empty = None


class ToolName(RequestPart, kw_only=True):
    """A function that the model may call, by name."""

    type: Literal["function"]
    name: str


class FunctionChoice(RequestPart, kw_only=True, omit_defaults=True):
    """A `tool_choice` that forces a call of one function, or allows those of some."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None  # of a function
    # Of allowed_tools.
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolName] | None = None


class TextFormat(RequestPart, kw_only=True, omit_defaults=True):
    """What the text is; a schema is kept to, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def structured_outputs(self) -> StructuredOutputs | None:
        """What it asks for. Raises `RequestError` for parts that are missing or out of place."""
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
    """How the text is bound."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(RequestPart, kw_only=True, omit_defaults=True):
    """How much the model thinks; there are no summaries of it, for all of it is told."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None  # its older name
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None
    max_tokens: Int | None = None  # extension, as at OpenRouter: the thinking budget


class ResponsesRequest(ModelRequest, kw_only=True, omit_defaults=True):
    """The JSON body of POST /v1/responses: input items, and how to answer them."""

    input: str | list[InputItem]
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # it comes as text
    instructions: str | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None  # of OpenAI's own tools
    metadata: dict[str, str] | None = None  # comes back
    parallel_tool_calls: bool | None = None  # false: at most one call in a response
    previous_response_id: str | None = None
    reasoning: ReasoningConfig | None = None
    store: bool | None = None  # default true
    stream: bool | None = None
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    tools: list[FunctionTool] | None = None
    top_p: float | None = None
    user: str | None = None
    # Extensions, as on the other routes.
    thinking_token_budget: Int | None = None  # as in vLLM: reasoning tokens; -1: any number
    priority: Int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    hints: Hints | None = None

    def sampling_params(
        self, defaults: SamplingDefaults, default_max_tokens: int | None
    ) -> SamplingParams:
        """The request's sampling parameters; what it leaves open is taken from `defaults`, its
        length from `default_max_tokens` if these have none. Raises `RequestError` that names the
        field.
        """
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_output_tokens,
        }
        if self.text is not None and self.text.format is not None:
            given["structured_outputs"] = self.text.format.structured_outputs()
        given = {name: value for name, value in given.items() if value is not None}
        return defaults.fill(given, max_tokens=default_max_tokens)

    def thinking_budget(self) -> tuple[int | None, str]:
        """How many reasoning tokens there may be, and the field that says so. Raises `RequestError`
        for two fields that differ.
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

    def request_fields(self) -> dict[str, Any]:
        """Keyword arguments of `AsyncEngine.add_request`, but for the id; no null among them."""
        names = ("user", "priority", "timeout", "cache_salt", "hints")
        given = {name: getattr(self, name) for name in names}
        return {k: v for k, v in given.items() if v is not None}


# Responses


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of what was thought."""

    text: str = ""


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """An output item with the text of the reply."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought aloud."""

    id: str
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """An output item with a call of a function."""

    id: str
    status: Status = "in_progress"
    call_id: str  # what its output must name
    name: str
    arguments: str = ""


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct, kw_only=True):
    """Where the tokens of the prompt came from."""

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
    """Why a response is not whole."""

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
    tools: list[FunctionTool]
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class Whole(RequestPart, kw_only=True):
    """The query parameters of GET /v1/responses/{id}, which asks for a whole response."""

    stream: bool = False  # true is refused


class Page(RequestPart, kw_only=True):
    """The query parameters of GET /v1/responses/{id}/input_items: which page of the items."""

    after: str | None = None  # an id: what comes then
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


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


# Events
