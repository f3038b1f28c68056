"""The wire structs of chat completions: tools, messages, replies and the pieces of a stream.

Requests refuse unknown fields, as all do. Knows nothing about HTTP or the engine.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aioserve.server.protocol import (
    ChatLogprobs,
    Choice,
    Empty,
    Envelope,
    GenerationRequest,
    Int,
    PromptLogprobs,
    RequestPart,
)


class FunctionDefinition(RequestPart, kw_only=True, omit_defaults=True):
    """A function that the model may call, with the schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; null: the function takes none
    strict: bool | None = None  # forced calls always are


class Tool(RequestPart, kw_only=True):
    """One tool of a request; every tool is a function."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = None  # a hint


#: A `Tool`, or one that only a vendor runs, whose fields are its own.
ToolEntry = Annotated[dict[str, Any], Meta(description="A tool: type and function.")]


class FunctionName(RequestPart, kw_only=True):
    """The name of the function that a tool choice forces."""

    name: str


class NamedToolChoice(RequestPart, kw_only=True):
    """A `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    function: FunctionName


class ImageURL(RequestPart, kw_only=True, omit_defaults=True):
    """Where an image is, or all of it in a data: URL."""

    url: str
    detail: Any = None  # a hint: the model's own processor has the say


class VideoURL(RequestPart, kw_only=True, omit_defaults=True):
    """The frames of a video in a data: URL."""

    url: str


#: The types of such parts, and the fields that a part of each may have.
SHOWN = {"image_url": ("image_url",), "video_url": ("video_url", "fps")}


class ContentPart(RequestPart, kw_only=True, omit_defaults=True):
    """One part of a message: a text, an image or a video."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", *SHOWN]})]
    text: str | None = None
    image_url: ImageURL | None = None
    video_url: VideoURL | None = None
    fps: float | None = None  # frames per second, of a video
    cache_control: Any = None  # a hint: prefixes are cached by themselves
    # Of parts of other types.
    input_audio: Empty = None
    audio_url: Empty = None
    file: Empty = None
    refusal: Empty = None


class FunctionCall(RequestPart, kw_only=True, omit_defaults=True):
    """What is called, and with what."""

    name: str
    arguments: str  # a JSON object, as text


class ToolCall(RequestPart, kw_only=True, omit_defaults=False):
    """A call that a reply makes, as it is sent and as it comes back."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestPart, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool: the call that it answers
    reasoning_content: str | None = None  # of an assistant
    reasoning: str | None = None  # vLLM's name for it
    cache_control: Any = None  # hints
    annotations: Any = None
    # Sent back by clients that replay an assistant's message.
    function_call: Empty = None
    audio: Empty = None
    refusal: Empty = None
    provider_specific_fields: dict[str, Empty] | None = None  # LiteLLM's notes


class ChatCompletionRequest(GenerationRequest, kw_only=True, omit_defaults=True):
    """The JSON body of POST /v1/chat/completions: messages, tools, and how to answer."""

    messages: list[ChatMessage]
    max_tokens: Int | None = None  # the older name of max_completion_tokens
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[ToolEntry] | None = None
    add_generation_prompt: bool | None = None  # false: the template begins no reply
    continue_final_message: bool | None = None  # the reply goes on with the last message
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    thinking_token_budget: Int | None = None  # as in vLLM: reasoning tokens; -1: any number
    verbosity: str | None = None  # a hint, as reasoning_effort, where the template looks at it
    chat_template_kwargs: dict[str, Any] | None = None  # what else the template looks at
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call in a reply
    include_reasoning: bool | None = None  # false: reasoning is left out
    separate_reasoning: bool | None = None  # false: it stays in the content, as it was written


class ChatReplyMessage(msgspec.Struct, kw_only=True):
    """The assistant's message: text, reasoning and tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None  # null: calls are all that it says
    reasoning_content: str | UnsetType = UNSET  # extension
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """One whole reply of a chat completion."""

    message: ChatReplyMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Envelope, kw_only=True):
    """The response of POST /v1/chat/completions without `stream`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # extension


class FunctionCallDelta(msgspec.Struct, kw_only=True):
    """The name comes first, with no arguments yet; then they, piece by piece."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The next piece of a call; the first one says its id."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    """The next piece of a message; the first one of a choice says the role."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # extension
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Choice, kw_only=True):
    """The next piece of a reply."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(Envelope, kw_only=True):
    """Each chunk of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # extension
