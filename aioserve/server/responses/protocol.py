"""The wire structs of requests of OpenAI's Responses API; those of answers are in `response`.

Requests refuse unknown fields, as in `protocol`. Knows nothing about HTTP or the engine.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from aioserve.errors import RequestError
from aioserve.params import MAX_LOGPROBS, SamplingDefaults, SamplingParams, StructuredOutputs
from aioserve.server.chat.tool_structs import FunctionDefinition
from aioserve.server.protocol import Empty, Int, RequestPart, SamplingRequest


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
        """The request's sampling parameters; what it leaves open is taken from `defaults`, its
        length from `default_max_tokens` if these have none. Raises `RequestError` that names the
        field.
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


class Whole(RequestPart, kw_only=True):
    """The query parameters of GET /v1/responses/{id}, which asks for a whole response."""

    stream: bool = False  # true is refused


class Page(RequestPart, kw_only=True):
    """The query parameters of GET /v1/responses/{id}/input_items: which page of the items."""

    after: str | None = None  # an id: what comes then
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
