"""Which tools a chat request offers, and which of them the reply has to call.

Knows the wire structs and what can be meant by them. Knows nothing about how models write calls.
"""

import re
from typing import Any

import msgspec

from aioserve.errors import RequestError
from aioserve.server.chat.schema_check import check_schema
from aioserve.server.formats.call_parser import Function
from aioserve.server.protocol import ChatCompletionRequest, NamedToolChoice, Tool

# What every way to write calls can tell from what stands around it.
_NAME = re.compile(r"[\w.:/\-]{1,128}", re.ASCII)
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class ToolUse(msgspec.Struct, frozen=True):
    """The tools that a reply may call."""

    tools: list[dict[str, Any]]  # as chat templates know them
    may_call: tuple[str, ...]  # names
    must_call: bool
    is_parallel: bool  # or one call at most

    def functions(self) -> list[Function]:
        """Those that may be called."""
        functions = (tool["function"] for tool in self.tools)
        return [
            Function(f["name"], f["parameters"]) for f in functions if f["name"] in self.may_call
        ]


def tool_use(body: ChatCompletionRequest) -> ToolUse | None:
    """What `body` asks for; None if no tool may be called. Raises `RequestError` that says where.

    Tools that may not be called (`none`) are not told to the model, either.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    tools: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(body.tools):
        path = f"tools[{i}].function"
        if tool.function.name in tools:
            raise RequestError(
                f"there are two tools of the name {tool.function.name!r}", param=f"{path}.name"
            )
        tools[tool.function.name] = _template_tool(tool, path)
    if choice == "none":
        return None
    names = tuple(tools)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in tools:
            raise RequestError(
                f"tool_choice names {name!r}, which is none of the tools",
                param="tool_choice.function.name",
            )
        names = (name,)
    return ToolUse(
        tools=list(tools.values()),
        may_call=names,
        must_call=choice not in (None, "auto"),
        is_parallel=body.parallel_tool_calls is not False
        and not isinstance(choice, NamedToolChoice),
    )


def _template_tool(tool: Tool, path: str) -> dict[str, Any]:
    function = tool.function
    if not _NAME.fullmatch(function.name):
        raise RequestError(
            "the name of a tool must be 1 to 128 of the characters A-Z, a-z, 0-9, _ - . : and /, "
            f"got {function.name!r}",
            param=f"{path}.name",
        )
    parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
    check_schema(parameters, f"{path}.parameters")
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"the parameters of a tool are of type object, got {parameters['type']!r}",
            param=f"{path}.parameters.type",
        )
    told = {"name": function.name, "description": function.description, "parameters": parameters}
    told = {key: value for key, value in told.items() if value is not None}
    return {"type": "function", "function": told}
