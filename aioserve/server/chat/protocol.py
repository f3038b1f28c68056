"""The wire structs of chat completions: tools, messages, replies and the pieces of a stream.

Requests refuse unknown fields, as on all routes. At the end of the file, messages become those that
chat templates know. Knows nothing about HTTP.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aioserve.engine.chat.tools import NamedToolChoice, OfferedTool, template_call
from aioserve.errors import RequestError
from aioserve.server.body import refuse_all_but
from aioserve.server.fields import CacheControl
from aioserve.server.images import Content, ImageParts, Part, content_of, text_part
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


class Tool(OfferedTool, kw_only=True):
    """One tool of a request; every tool is a function."""

    cache_control: Any = None  # as that of a part of a message


#: A `Tool`, or one that only a vendor runs, whose fields are its own.
ToolEntry = Annotated[dict[str, Any], Meta(description="A tool: type and function.")]


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
    cache_control: Any = None  # its `ttl`: for how long the prefix is kept
    # Of parts of other types.
    input_audio: Empty = None
    audio_url: Empty = None
    file: Empty = None
    refusal: Empty = None


class FunctionCall(RequestPart, kw_only=True, omit_defaults=True):
    """The name of the called function, and its arguments."""

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
    cache_control: Any = None  # as that of its last part
    annotations: Any = None  # a hint
    # Sent back by clients that replay an assistant's message.
    function_call: Empty = None
    audio: Empty = None
    refusal: Empty = None
    provider_specific_fields: dict[str, Empty] | None = None  # LiteLLM's notes


class Thinking(RequestPart, kw_only=True, omit_defaults=True):
    """The switch of reasoning, as DeepSeek has it, with the budget that LiteLLM sends in it."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Int | None = None  # as thinking_token_budget


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
    thinking: Thinking | None = None  # as reasoning_effort: none if disabled, else any
    thinking_token_budget: Int | None = None  # as in vLLM: reasoning tokens; -1: any number
    verbosity: str | None = None  # a hint, as reasoning_effort, where the template looks at it
    chat_template_kwargs: dict[str, Any] | None = None  # what else the template looks at
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call in a reply
    include_reasoning: bool | None = None  # false: reasoning is left out
    separate_reasoning: bool | None = None  # false: it stays in the content, as it was written
    cache_control: Any = None  # as that of the last message

    def cache_controls(self) -> Iterator[CacheControl]:
        """Yield each `cache_control`, null or not, with its place in the body."""
        yield (), self.cache_control
        for i, tool in enumerate(self.tools or ()):
            yield ("tools", i), tool.get("cache_control")
        for i, message in enumerate(self.messages):
            yield ("messages", i), message.cache_control
            for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
                yield ("messages", i, "content", j), part.cache_control

    @property
    def effort(self) -> str | None:
        """How much to reason, by either field that says it. Raises `RequestError` if they differ;
        an effort that is not stated is medium where reasoning is enabled.
        """
        if self.thinking is None:
            return self.reasoning_effort
        is_on = self.thinking.type == "enabled"
        if self.reasoning_effort is not None and (self.reasoning_effort != "none") != is_on:
            raise RequestError(
                f"thinking is {self.thinking.type}, and reasoning_effort {self.reasoning_effort}: "
                "give one of them",
                param="thinking",
            )
        return (self.reasoning_effort or "medium") if is_on else "none"

    @property
    def most_reasoning(self) -> tuple[int | None, str]:
        """The most reasoning tokens, and the field that says it. Raises `RequestError` if two do,
        and differ.
        """
        own = self.thinking_token_budget
        other = None if self.thinking is None else self.thinking.budget_tokens
        if None not in (own, other) and own != other:
            raise RequestError(
                "thinking_token_budget and thinking.budget_tokens differ: give one of them",
                param="thinking.budget_tokens",
            )
        return (
            (own, "thinking_token_budget") if other is None else (other, "thinking.budget_tokens")
        )


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


# The messages of a request as chat templates know them. What no template could be told is refused,
# with its place. Knows nothing about templates.


# What a message may hold besides role and content, by its role.
_SERVED = {
    "system": ("name",),
    "developer": ("name",),
    "user": ("name",),
    "assistant": (
        *("name", "tool_calls", "reasoning_content", "reasoning"),
        "provider_specific_fields",  # LiteLLM's notes, if they are empty
    ),
    "tool": ("name", "tool_call_id"),
}


_ALWAYS = ("role", "content", "cache_control", "annotations")

# Whose content may hold images and videos.
_SHOW_IMAGES = ("user", "tool")


def template_messages(messages: Sequence[ChatMessage], images: ImageParts) -> list[dict[str, Any]]:
    """Return what the chat template gets to see; of images, `images` takes note. Raises
    `RequestError`.
    """
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    names: dict[str, str] = {}  # of the functions that were called, by the ids of the calls
    rendered = []
    for i, message in enumerate(messages):
        rendered.append(_template_message(f"messages[{i}]", message, names, images))
        names.update((call.id, call.function.name) for call in message.tool_calls or ())
    return rendered


def _template_message(
    path: str, message: ChatMessage, names: dict[str, str], images: ImageParts
) -> dict[str, Any]:
    refuse_all_but((*_ALWAYS, *_SERVED[message.role]), message, path)
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": _content(message, path, images)}
    if message.name is not None:
        rendered["name"] = message.name
    if message.role == "assistant":
        for name, value in (message.provider_specific_fields or {}).items():
            if value:
                where = f"{path}.provider_specific_fields.{name}"
                raise RequestError(f"{where} is not supported by this server", param=where)
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            rendered["reasoning_content"] = reasoning
        if message.tool_calls:
            rendered["tool_calls"] = [
                template_call(call.id, call.function.name, call.function.arguments)
                for call in message.tool_calls
            ]
    elif message.role == "tool":
        if not message.tool_call_id:
            raise RequestError(
                f"{path}.tool_call_id is missing: which call is answered",
                param=f"{path}.tool_call_id",
            )
        rendered["tool_call_id"] = message.tool_call_id
        if message.name is None and message.tool_call_id in names:
            rendered["name"] = names[message.tool_call_id]  # some templates say it
    return rendered


def _content(message: ChatMessage, path: str, images: ImageParts) -> Content | None:
    path = f"{path}.content"
    if message.content is None:
        if message.tool_calls:
            return None
        if message.role == "assistant" and (message.reasoning_content or message.reasoning):
            return ""
        raise RequestError(f"{path} is missing", param=path)
    if isinstance(message.content, str):
        return message.content
    types = ("text", *SHOWN) if message.role in _SHOW_IMAGES else ("text",)
    parts = []
    for j, part in enumerate(message.content):
        place = f"{path}[{j}]"
        if part.type not in types:
            raise RequestError(
                f"content parts of type {part.type[:64]!r} are not supported in messages of role "
                f"{message.role}, only {', '.join(map(repr, types))}",
                param=place,
            )
        own = SHOWN.get(part.type, ("text",))
        refuse_all_but(("type", "cache_control", *own), part, place)
        if part.type == "text":
            if part.text is None:
                raise RequestError(f"{place}.text is missing", param=f"{place}.text")
            parts.append(text_part(part.text))
        else:
            parts.append(shown_part(part, place, images))
    return content_of(parts)


def shown_part(part: Any, place: str, images: ImageParts) -> Part:
    """Return a `ContentPart` of one of these types as chat templates know it; `images` takes note
    of what it shows. Raises `RequestError`.
    """
    source = getattr(part, part.type)
    if source is None:
        raise RequestError(f"{place}.{part.type} is missing", param=f"{place}.{part.type}")
    path = f"{place}.{part.type}.url"
    if part.type == "image_url":
        return images.media.add(path, source.url)
    return images.media.add_video(path, source.url, part.fps, f"{place}.fps")
