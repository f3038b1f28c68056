"""The wire structs of OpenAI's Responses API.

Requests refuse unknown fields, as in `protocol`. Knows nothing about HTTP or the engine.
"""

from typing import Any, Literal

import msgspec

from aioserve.sampling_params import SamplingParams
from aioserve.server.protocol import Int, ModelRequest, RequestPart, Usage

# Requests


class InputPart(RequestPart, kw_only=True, omit_defaults=True):
    """One part of a message; only text is understood."""

    type: str
    text: str | None = None
    # Of parts that replies have, or of other types; refused unless empty.
    annotations: Any = None
    detail: Any = None
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    filename: Any = None
    image_url: Any = None
    input_audio: Any = None
    logprobs: Any = None
    refusal: Any = None


class InputItem(RequestPart, kw_only=True, omit_defaults=True):
    """One message, given or as a reply had it."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    # Labels of a reply's message.
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponsesRequest(ModelRequest, kw_only=True, omit_defaults=True):
    """Body of POST /v1/responses."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    metadata: dict[str, str] | None = None  # comes back
    previous_response_id: str | None = None
    store: bool | None = None  # default true
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    # Extensions, as on the other routes.
    priority: Int | None = None
    timeout: float | None = None
    cache_salt: str | None = None

    def sampling_params(self) -> SamplingParams:
        """The request's sampling parameters. Raises `RequestError` that names the field."""
        given = {"temperature": self.temperature, "top_p": self.top_p}
        params: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        return SamplingParams(max_tokens=self.max_output_tokens, **params)

    def request_fields(self) -> dict[str, Any]:
        """Keyword arguments of `AsyncEngine.add_request`, but for the id; no null among them."""
        names = ("user", "priority", "timeout", "cache_salt")
        given = {name: getattr(self, name) for name in names}
        return {k: v for k, v in given.items() if v is not None}


# Responses


class OutputText(msgspec.Struct, kw_only=True):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(msgspec.Struct, kw_only=True):
    """What is said."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: str  # in_progress, completed or incomplete
    content: list[OutputText]


class InputDetails(msgspec.Struct, kw_only=True):
    """Where the tokens of the prompt came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, kw_only=True):
    """Reasoning is counted with the rest."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """The same counts."""
        details = usage.prompt_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=details.cached_tokens if details else 0
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=usage.total_tokens,
        )


class Incomplete(msgspec.Struct, kw_only=True):
    """Why a response is not whole."""

    reason: str


class Format(msgspec.Struct, kw_only=True, frozen=True):
    """What the text is: free."""

    type: Literal["text"] = "text"


class TextConfig(msgspec.Struct, kw_only=True, frozen=True):
    """How the text is bound."""

    format: Format = Format()


class Response(msgspec.Struct, kw_only=True):
    """Response of /v1/responses, and what its events carry."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    store: bool
    temperature: float
    text: TextConfig = TextConfig()
    tool_choice: str = "auto"
    tools: list[Any] = []
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


# Events


class ResponseEvent(msgspec.Struct, kw_only=True):
    """How the whole stands: created, in_progress, completed or incomplete."""

    type: str
    sequence_number: int
    response: Response


class ItemEvent(msgspec.Struct, kw_only=True):
    """A message begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int = 0
    item: OutputMessage


class PartEvent(msgspec.Struct, kw_only=True):
    """Its text begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int = 0
    content_index: int = 0
    part: OutputText


class TextEvent(msgspec.Struct, kw_only=True):
    """More text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int = 0
    content_index: int = 0
    delta: str
    logprobs: list[Any] = []


class TextDone(msgspec.Struct, kw_only=True):
    """All the text."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int = 0
    content_index: int = 0
    text: str
    logprobs: list[Any] = []


class ErrorEvent(msgspec.Struct, kw_only=True):
    """The last event of a stream that failed."""

    type: Literal["error"] = "error"
    sequence_number: int
    code: str | None
    message: str
    param: str | None
