"""Messages and tools of Anthropic's as chat templates know them.

Refuses what no template could be told, with its place. Knows nothing about templates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aioserve.errors import RequestError
from aioserve.server.anthropic.blocks import (
    BLOCKS,
    RESULTS,
    SYSTEM,
    all_parts,
    checked_blocks,
    parts_of,
)
from aioserve.server.anthropic.protocol import (
    Block,
    CountTokensRequest,
    InputMessage,
    ToolChoice,
    ToolDefinition,
)
from aioserve.server.chat.tool_structs import FunctionDefinition
from aioserve.server.chat.tool_use import Choice, Names, ToolUse, tool_use
from aioserve.server.images import ImageParts, content_of, joined, text_part
from aioserve.server.passed_over import is_vendors
from aioserve.server.validation import convert_part

_CHOICES: Mapping[str, Choice] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",
}


def template_messages(body: CountTokensRequest, images: ImageParts) -> list[dict[str, Any]]:
    """What the chat template gets to see; messages of one role in a row become one. Of images,
    `images` takes note.

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
    """The tools that are offered, but those of vendors. Raises `RequestError` that says where."""
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
