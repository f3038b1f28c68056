"""The messages of a chat request as chat templates know them.

Refuses what no template could be told, with its place. Knows nothing about templates.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from aioserve.errors import UNREADABLE, RequestError
from aioserve.server.body import refuse_all_but
from aioserve.server.chat.protocol import SHOWN, ChatMessage
from aioserve.server.images import Content, ImageParts, Part, content_of, text_part

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


def template_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as chat templates know it. Arguments that are no JSON object stay text: a model
    once wrote them, and the conversation goes on.
    """
    decoded: Any = {}
    if arguments.strip():
        try:
            decoded = msgspec.json.decode(arguments, type=dict[str, Any])
        except UNREADABLE:
            decoded = arguments
    function = {"name": name, "arguments": decoded}
    return {"id": call_id, "type": "function", "function": function}


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
