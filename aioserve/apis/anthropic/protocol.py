"""The wire structs of Anthropic's Messages API.

Requests refuse unknown fields, as in `protocol`. Knows nothing about HTTP or the engine.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aioserve.errors import RequestError
from aioserve.params import SamplingDefaults, SamplingParams, StructuredOutputs
from aioserve.server.errors import ApiStyle
from aioserve.server.fields import CacheControl
from aioserve.server.protocol import Empty, ErrorInfo, Int, RequestPart, SamplingRequest, Usage

# Requests


class Source(RequestPart, kw_only=True, omit_defaults=True):
    """Where an image or a document is, or all of it; its type says which."""

    type: str
    # Of base64, and of text.
    media_type: str | None = None
    data: str | None = None
    # Of url.
    url: str | None = None
    # Of content.
    content: "str | list[Block] | None" = None
    # Of others; not served.
    file_id: Empty = None


class Block(RequestPart, kw_only=True, omit_defaults=True):
    """One block of a message, of the system prompt or of a tool's result; its type says which
    fields it has.
    """

    type: str
    text: str | None = None
    cache_control: Any = None  # its `ttl`: for how long the prefix is kept
    # Of tool_use.
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    # Of tool_result.
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    # Of thinking.
    thinking: str | None = None
    signature: str | None = None  # never checked: any model's thinking is taken
    # Of image and document.
    source: Source | None = None
    # Of document.
    context: str | None = None
    title: str | None = None
    # Of tool_reference.
    tool_name: str | None = None
    # Hints: where a call or a text came from.
    caller: Any = None
    citations: Any = None
    data: Any = None  # of redacted_thinking, which only its vendor can read
    # Of blocks that are not understood; not served.
    toolset_name: Empty = None


class InputMessage(RequestPart, kw_only=True, omit_defaults=True):
    """A message of a conversation: its role, and a text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Metadata(RequestPart, kw_only=True, omit_defaults=True):
    """The user for whom the client sends the request."""

    user_id: str | None = None


class ToolDefinition(RequestPart, kw_only=True, omit_defaults=True):
    """A tool that the model may call, with the schema of its input."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None  # custom
    strict: bool | None = None
    cache_control: Any = None  # as that of a block
    # Hints: every tool is told to the model at once.
    allowed_callers: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None


#: A `ToolDefinition`, or a tool of Anthropic's, whose fields are its own.
ToolEntry = Annotated[
    dict[str, Any],
    Meta(description="A tool: name, input_schema, description, strict; or one of Anthropic's."),
]


class ToolChoice(RequestPart, kw_only=True, omit_defaults=True):
    """Which tools may, or must, be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of a tool
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestPart, kw_only=True, omit_defaults=True):
    """Whether a model's reasoning is told, and how many tokens of it there may be; it reasons as
    its chat template has it.
    """

    type: Literal["disabled", "adaptive", "enabled", "between_tools"]
    budget_tokens: Int | None = None
    display: str | None = None  # omitted: as disabled
    block_binding: Any = None  # a hint: no block is signed

    @property
    def is_told(self) -> bool:
        """Whether the client gets to see the reasoning."""
        return self.type != "disabled" and self.display != "omitted"

    def budget(self) -> int | None:
        """Return the most reasoning tokens. Raises `RequestError` if `enabled` comes without, or
        for fewer than 1.
        """
        if self.budget_tokens is None:
            if self.type == "enabled":
                raise RequestError(
                    "thinking.budget_tokens is missing: thinking of type enabled needs it, as the "
                    "largest number of reasoning tokens",
                    param="thinking.budget_tokens",
                )
            return None
        if self.budget_tokens < 1:
            raise RequestError(
                f"thinking.budget_tokens must be at least 1, got {self.budget_tokens}",
                param="thinking.budget_tokens",
            )
        return self.budget_tokens


class OutputFormat(RequestPart, kw_only=True):
    """The JSON schema that the text of a reply keeps to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(RequestPart, kw_only=True, omit_defaults=True):
    """How the text of a reply is bound, and how much the model thinks before it."""

    format: OutputFormat | None = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    task_budget: Any = None  # a hint of the vendor's models


class CountTokensRequest(SamplingRequest, kw_only=True, omit_defaults=True):
    """Body of POST /v1/messages/count_tokens: what makes no prompt changes no count."""

    messages: list[InputMessage]
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    system: str | list[Block] | None = None
    thinking: Thinking | None = None
    tools: list[ToolEntry] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # what else the template looks at
    max_tokens: Int | None = None
    metadata: Metadata | None = None
    stop_sequences: tuple[str, ...] | None = None
    cache_control: Any = None  # as that of the last block

    def cache_controls(self) -> Iterator[CacheControl]:
        """Yield each `cache_control`, null or not, with its place in the body."""
        yield (), self.cache_control
        for i, tool in enumerate(self.tools or ()):
            yield ("tools", i), tool.get("cache_control")
        yield from _cache_controls(self.system, "system")
        for i, message in enumerate(self.messages):
            yield from _cache_controls(message.content, "messages", i, "content")

    @property
    def format(self) -> OutputFormat | None:
        """The JSON schema of the reply: `output_config.format`, or `output_format`."""
        return (self.output_config and self.output_config.format) or self.output_format

    @property
    def bound_by(self) -> str | None:
        """The field that the text is bound by, if it is another than `structured_outputs`."""
        if self.output_config is not None and self.output_config.format is not None:
            return "output_config.format.schema"
        return None if self.output_format is None else "output_format.schema"

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the request's sampling parameters; `defaults` are for what it leaves open. Raises
        `RequestError` that names the field.
        """
        if self.stop is not None and self.stop_sequences is not None:
            raise RequestError("give stop_sequences or stop, not both", param="stop")
        stop = self.stop if self.stop_sequences is None else self.stop_sequences
        wanted = None if self.format is None else StructuredOutputs(json=self.format.schema)
        return self.make_params(
            self.max_tokens, defaults, wanted=wanted, wanted_by="output_config.format", stop=stop
        )


def _cache_controls(content: str | list[Block] | None, *path: str | int) -> Iterator[CacheControl]:
    if isinstance(content, list):
        for i, block in enumerate(content):
            yield (*path, i), block.cache_control
            yield from _cache_controls(block.content, *path, i, "content")


class MessagesRequest(CountTokensRequest, kw_only=True, omit_defaults=True):
    """The JSON body of POST /v1/messages: messages, and how to answer them."""

    max_tokens: Int

    def request_fields(self) -> dict[str, Any]:
        """Keyword arguments of `AsyncEngine.add_request`, but for the id; no null among them."""
        fields = super().request_fields()
        if self.metadata is not None and self.metadata.user_id is not None:
            fields["user"] = self.metadata.user_id
        return fields


# Responses


class InputTokens(msgspec.Struct, kw_only=True):
    """The response of POST /v1/messages/count_tokens: how many tokens the prompt has."""

    input_tokens: int


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A block with text for the user."""

    text: str = ""


#: The signature of all reasoning: clients hand back none that has no signature.
UNSIGNED = "unsigned"


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """A block with the reasoning of the model; in a stream its signature comes last."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call; in a stream its input follows as JSON text, whole."""

    id: str
    name: str
    input: dict[str, Any] = {}


ReplyBlock = TextBlock | ThinkingBlock | ToolUseBlock


class CacheCreation(msgspec.Struct, kw_only=True):
    """The tokens of `cache_creation_input_tokens`, by the time for which they are to be kept."""

    ephemeral_5m_input_tokens: int = 0  # up to five minutes
    ephemeral_1h_input_tokens: int = 0  # longer


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts; the three of the input are apart, and their sum is the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # 0 unless a `ttl` is stated: caching costs nothing
    cache_creation: CacheCreation | UnsetType = UNSET
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage, cache_seconds: float = 0, block_size: int = 1) -> "MessageUsage":
        """Convert an OpenAI usage to Anthropic's, which counts cached tokens apart, and if the
        prompt is to be kept for `cache_seconds`, the other tokens of its whole KV blocks.
        """
        details = usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens
        created = 0
        creation: CacheCreation | UnsetType = UNSET
        if cache_seconds > 0:
            created = max(usage.prompt_tokens // block_size * block_size - cached, 0)
            is_short = cache_seconds <= 300
            creation = CacheCreation(
                ephemeral_5m_input_tokens=created if is_short else 0,
                ephemeral_1h_input_tokens=0 if is_short else created,
            )
        return cls(
            input_tokens=usage.prompt_tokens - cached - created,
            cache_creation_input_tokens=created,
            cache_creation=creation,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


class Stop(msgspec.Struct, kw_only=True):
    """Why a message ended: Anthropic's words, or `abort` and `timeout`, for which it has none."""

    stop_reason: str | None = None
    stop_sequence: str | None = None


class Message(Stop, kw_only=True):
    """Response of /v1/messages; without content, the beginning of a stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyBlock]
    usage: MessageUsage


# Events


class MessageStart(msgspec.Struct, kw_only=True):
    """The first event of a stream, with an empty message."""

    type: Literal["message_start"] = "message_start"
    message: Message


class BlockStart(msgspec.Struct, kw_only=True):
    """The event with which a content block begins."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: ReplyBlock


class Ping(msgspec.Struct, kw_only=True):
    """An event without content, sent after the first one as Anthropic does."""

    type: Literal["ping"] = "ping"


class TextDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    """More of the text of a text block."""

    text: str


class ThinkingDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More of the text of a thinking block."""

    thinking: str


class SignatureDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, after all of its text."""

    signature: str = UNSIGNED


class InputDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of the input of a call, as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, kw_only=True):
    """The next piece of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, kw_only=True):
    """The event with which a content block ends."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageDelta(msgspec.Struct, kw_only=True):
    """Why the message has ended, and what it took."""

    type: Literal["message_delta"] = "message_delta"
    delta: Stop
    usage: MessageUsage


class MessageStop(msgspec.Struct, kw_only=True):
    """The last event of a stream."""

    type: Literal["message_stop"] = "message_stop"


# Errors


class ErrorDetail(msgspec.Struct, kw_only=True):
    """The type of an error and its message."""

    type: str
    message: str
    details: dict[str, str] | UnsetType = UNSET  # what clients look at: `error_code`


class MessagesError(msgspec.Struct, kw_only=True):
    """Body of every error, and the last event of a stream that failed."""

    type: Literal["error"] = "error"
    error: ErrorDetail


_OVERLOADED = 529  # Anthropic's, where the limit is the server's and not the client's
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


def to_messages_error(status: int, info: ErrorInfo) -> tuple[int, MessagesError]:
    """Return the same in Anthropic's words: a full queue is its 529, and the message names the
    field.
    """
    status = _anthropic_status(status, info.code)
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    names_field = info.param is None or info.param in info.message
    message = info.message if names_field else f"{info.param}: {info.message}"
    # Anthropic's tool runner goes on without a thread where it reads this.
    is_thread = info.param == "thread"
    details = {"error_code": "thread_unsupported_request"} if is_thread else msgspec.UNSET
    return status, MessagesError(error=ErrorDetail(type=kind, message=message, details=details))


def _anthropic_status(status: int, code: str | None) -> int:
    return _OVERLOADED if (status, code) == (429, "engine_overloaded") else status


STYLE = ApiStyle(
    MessagesError,
    _anthropic_status,
    to_messages_error,
    key_header="x-api-key",
    id_header="Request-Id",
)
