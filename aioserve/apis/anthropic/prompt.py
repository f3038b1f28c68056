"""Messages and tools of Anthropic's as chat templates know them.

Refuses what no template could be told, with its place. Knows nothing about templates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aioserve.apis.anthropic.protocol import (
    Block,
    CountTokensRequest,
    InputMessage,
    Source,
    ToolChoice,
    ToolDefinition,
)
from aioserve.engine.chat.tools import Choice, Names, ToolUse, tool_use
from aioserve.errors import RequestError
from aioserve.server.body import convert_part, refuse_all_but
from aioserve.server.chat.protocol import FunctionDefinition
from aioserve.server.fields import is_vendors
from aioserve.server.images import ImageParts, Part, content_of, joined, text_part

_CHOICES: Mapping[str, Choice] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",
}


def template_messages(body: CountTokensRequest, images: ImageParts) -> list[dict[str, Any]]:
    """Return what the chat template gets to see; messages of one role in a row become one. Of
    images, `images` takes note.

    Raises `RequestError`.
    """
    if not body.messages:
        raise RequestError("messages must not be empty", param="messages")
    messages: list[dict[str, Any]] = []
    if body.system:
        system = checked_blocks(body.system, SYSTEM, "system")
        messages.append({"role": "system", "content": _text(system)})
    names: dict[str, str] = {}  # of the tools that were called, by the ids of the calls
    for i, message in enumerate(body.messages):
        for told in _tell(message, f"messages[{i}].content", names, images):
            if messages[-1:] and messages[-1]["role"] == told["role"] != "tool":
                _join(messages[-1], told)
            else:
                messages.append(told)
    if messages[-1].get("tool_calls"):
        raise RequestError(
            "the last message calls a tool: its tool_result must follow",
            param=f"messages[{len(body.messages) - 1}].content",
        )
    return messages


def _tell(
    message: InputMessage, path: str, names: dict[str, str], images: ImageParts
) -> list[dict[str, Any]]:
    blocks = checked_blocks(message.content, BLOCKS[message.role], path)
    if message.role == "assistant":
        return [_assistants(blocks, names)]
    if message.role == "system":
        return [{"role": "system", "content": _text(blocks)}]
    results, shown = [], []
    for i, block in enumerate(blocks):
        place = f"{path}[{i}]"
        if block.type != "tool_result":
            shown += parts_of(block, place, images)
            continue
        place = f"{place}.content"
        inner = checked_blocks(block.content or "", RESULTS, place)
        parts = all_parts(inner, place, images)
        if block.is_error:
            parts.insert(0, text_part("Error: "))
        result = {
            "role": "tool",
            "content": content_of(parts),
            "tool_call_id": block.tool_use_id,
        }
        if block.tool_use_id in names:
            result["name"] = names[block.tool_use_id]  # some templates say it
        results.append(result)
    if shown or not results:
        results.append({"role": "user", "content": content_of(shown)})
    return results


def _assistants(blocks: Sequence[Block], names: dict[str, str]) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    thoughts = "".join(block.thinking or "" for block in blocks)
    if thoughts:
        told["reasoning_content"] = thoughts
    calls = [block for block in blocks if block.type == "tool_use"]
    names.update((block.id or "", block.name or "") for block in calls)
    if calls:
        told["tool_calls"] = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": block.input},
            }
            for block in calls
        ]
    return told


def _join(first: dict[str, Any], second: dict[str, Any]) -> None:
    """One message of two: texts a line each, images and calls one after the other."""
    for name, value in second.items():
        if name == "tool_calls":
            first[name] = first.get(name, []) + value
        elif name == "content":
            first[name] = joined(first[name], value)
        elif name != "role":
            first[name] = "\n".join(filter(None, (first.get(name), value)))


def _text(blocks: Sequence[Block]) -> str:
    return "".join(block.text or "" for block in blocks)


def tools_of(body: CountTokensRequest, *, ignore_unknown: bool = False) -> ToolUse | None:
    """Return the tools that are offered, but those of vendors. Raises `RequestError` that says
    where.
    """
    offered = {
        (path := f"tools[{i}]"): _function(tool, path, ignore_unknown)
        for i, tool in enumerate(body.tools or ())
        if not is_vendors(tool.get("type"))
    }
    choice = body.tool_choice or ToolChoice(type="auto")
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError(
            "tool_choice has a name if it is of type tool, and only then", param="tool_choice.name"
        )
    return tool_use(
        offered,
        _CHOICES[choice.type],
        only=None if choice.name is None else [choice.name],
        is_parallel=choice.name is None and not choice.disable_parallel_tool_use,
        names=Names(parameters="input_schema"),
    )


def _function(entry: dict[str, Any], path: str, ignore_unknown: bool) -> FunctionDefinition:
    tool = convert_part(entry, ToolDefinition, path, ignore_unknown=ignore_unknown)
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{path}: there are no tools of type {tool.type[:64]!r}, only 'custom' and Anthropic's "
            "own, which are passed over",
            param=path,
        )
    if tool.input_schema is None:
        raise RequestError(f"{path}.input_schema is missing", param=f"{path}.input_schema")
    return FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )


# Blocks of Anthropic's messages: which there are where, and what templates see of them. Texts,
# images and documents become parts of a content. Refuses, with its place, what is served nowhere.
# Knows nothing of turns and calls.


# By role of the message: the types of blocks, with the fields that each has.
SYSTEM: Mapping[str, Sequence[str]] = {"text": ("text",)}
_SHOWN: Mapping[str, Sequence[str]] = {
    **SYSTEM,
    "image": ("source",),
    "document": ("source", "title", "context"),
}
BLOCKS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "system": SYSTEM,
    "user": {**_SHOWN, "tool_result": ("tool_use_id", "content", "is_error")},
    "assistant": {
        **SYSTEM,
        "tool_use": ("id", "name", "input"),
        "thinking": ("thinking", "signature"),
        "redacted_thinking": (),  # no model but its vendor's can read it
    },
}
RESULTS: Mapping[str, Sequence[str]] = {**_SHOWN, "tool_reference": ("tool_name",)}
_REQUIRED = {
    "text": ("text",),
    "image": ("source",),
    "document": ("source",),
    "tool_result": ("tool_use_id",),
    "tool_use": ("id", "name", "input"),
    "thinking": ("thinking",),
    "tool_reference": ("tool_name",),
}
# By type of the source: the fields that it has.
_OF_IMAGES: Mapping[str, Sequence[str]] = {"base64": ("media_type", "data"), "url": ("url",)}
_OF_DOCUMENTS: Mapping[str, Sequence[str]] = {
    "text": ("media_type", "data"),
    "content": ("content",),
}
_IN_DOCUMENTS: Mapping[str, Sequence[str]] = {**SYSTEM, "image": ("source",)}
_HINTS = ("cache_control", "caller", "citations", "data")


def checked_blocks(
    content: str | list[Block], types: Mapping[str, Sequence[str]], path: str
) -> Sequence[Block]:
    """Return the blocks of a content, each of one of these types, with its fields and no others.
    Raises `RequestError` with the place of another one.
    """
    if isinstance(content, str):
        return [Block(type="text", text=content)]
    for i, block in enumerate(content):
        place = f"{path}[{i}]"
        if block.type not in types:
            known = " and ".join(map(repr, types))
            raise RequestError(
                f"{place}: blocks of type {block.type[:64]!r} are not supported here, only {known}",
                param=place,
            )
        refuse_all_but(("type", *types[block.type], *_HINTS), block, place)
        for name in _REQUIRED.get(block.type, ()):
            if getattr(block, name) is None:
                raise RequestError(f"{place}.{name} is missing", param=f"{place}.{name}")
    return content


def all_parts(blocks: Sequence[Block], path: str, images: ImageParts) -> list[Part]:
    """Checked blocks as chat templates know them, in their order. Raises `RequestError`."""
    return [part for i, one in enumerate(blocks) for part in parts_of(one, f"{path}[{i}]", images)]


def parts_of(block: Block, path: str, images: ImageParts) -> list[Part]:
    """Return a checked block of text, images or both, as chat templates know it; of images,
    `images` takes note. Raises `RequestError`.
    """
    if block.type == "tool_reference":  # every tool is told at once
        return [text_part(f"The tool {block.tool_name} can be called.\n")]
    if block.source is None:
        return [text_part(block.text or "")]
    if block.type == "document":
        return _document(block, block.source, path, images)
    source, path = block.source, f"{path}.source"
    _check_source(source, _OF_IMAGES, path)
    if source.type == "url":
        return [images.media.add(f"{path}.url", source.url or "")]
    return [images.media.add_base64(path, source.media_type or "", source.data or "")]


def _document(block: Block, source: Source, path: str, images: ImageParts) -> list[Part]:
    """Return a document in its place: title and context a line each, then all that is in it."""
    path = f"{path}.source"
    _check_source(source, _OF_DOCUMENTS, path)
    if source.type == "content":
        inner = checked_blocks(source.content or "", _IN_DOCUMENTS, f"{path}.content")
        parts = all_parts(inner, f"{path}.content", images)
    elif source.media_type != "text/plain":
        raise RequestError(
            f"{path}.media_type must be 'text/plain', got {source.media_type!r:.64}",
            param=f"{path}.media_type",
        )
    else:
        parts = [text_part(source.data or "")]
    heads = [text_part(f"{line}\n") for line in (block.title, block.context) if line]
    return [*heads, *parts, text_part("\n")]


def _check_source(source: Source, types: Mapping[str, Sequence[str]], path: str) -> None:
    """Raises `RequestError` for a source of another type, or with other fields."""
    if source.type not in types:
        known = " and ".join(map(repr, types))
        raise RequestError(
            f"{path}: sources of type {source.type[:64]!r} are not supported here, only {known}",
            param=path,
        )
    refuse_all_but(("type", *types[source.type]), source, path)
    for name in types[source.type]:
        if getattr(source, name) is None:
            raise RequestError(f"{path}.{name} is missing", param=f"{path}.{name}")
