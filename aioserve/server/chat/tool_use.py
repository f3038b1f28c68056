"""Which tools a request offers, and which of them the reply has to call: for every protocol.

Knows what can be meant by them. Knows nothing about how models write calls, nor how a protocol
wraps its tools.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from aioserve.errors import RequestError
from aioserve.formats import Function
from aioserve.server.chat.protocol import ChatCompletionRequest
from aioserve.server.chat.schema_check import check_parameters
from aioserve.server.chat.tool_structs import FunctionDefinition, NamedToolChoice, Tool
from aioserve.server.passed_over import is_vendors
from aioserve.server.validation import convert_part

# What every way to write calls can tell from what stands around it.
_NAME = re.compile(r"[\w.:/\-]{1,128}", re.ASCII)
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

Choice = Literal["none", "auto", "required"]


class Names(NamedTuple):
    """What a protocol calls its parts, for error messages to its clients."""

    parameters: str = "parameters"
    chosen: str = "tool_choice.name"  # one that must be called


OWN_NAMES = Names()


class ToolUse(msgspec.Struct, frozen=True):
    """The tools that a reply may call."""

    tools: list[dict[str, Any]]  # as chat templates know them
    functions: list[Function]  # those of them that may be called
    paths: dict[str, str]  # by name of a function, where its schema stands in the body
    must_call: bool
    is_parallel: bool  # or one call at most
    is_bound: bool  # a call that the model makes by itself keeps to what it may be


def tool_use(
    offered: Mapping[str, FunctionDefinition],
    choice: Choice,
    *,
    only: Sequence[str] | None = None,
    is_parallel: bool = True,
    names: Names = OWN_NAMES,
) -> ToolUse | None:
    """What is asked for, with calls of those named in `only`, if it is given; None if no tool may
    be called. `offered` is by the path of each function in the body. Raises `RequestError`.

    Tools that may not be called (`none`) are not told to the model, either.
    """
    if not offered and (choice == "required" or only is not None):
        raise RequestError("tool_choice needs tools", param="tool_choice")
    tools: list[dict[str, Any]] = []
    functions: dict[str, Function] = {}
    paths: dict[str, str] = {}
    for path, function in offered.items():
        if function.name in functions:
            raise RequestError(
                f"{path}.name: there are two tools of the name {function.name!r}",
                param=f"{path}.name",
            )
        parameters = _parameters(function, path, names.parameters)
        functions[function.name] = Function(function.name, parameters, bool(function.strict))
        paths[function.name] = f"{path}.{names.parameters}"
        tools.append(_template_tool(function, parameters))
    if not offered or choice == "none":
        return None
    for name in only or ():
        if name not in functions:
            raise RequestError(
                f"{names.chosen} is {name[:128]!r}, which names no tool", param=names.chosen
            )
    may_call = [f for f in functions.values() if only is None or f.name in only]
    return ToolUse(
        tools=tools,
        functions=may_call,
        paths=paths,
        must_call=choice == "required",
        is_parallel=is_parallel,
        is_bound=len(may_call) < len(tools) or any(f.is_strict for f in may_call),
    )


def chat_tool_use(body: ChatCompletionRequest, *, ignore_unknown: bool = False) -> ToolUse | None:
    """What a chat request asks for, without the tools of vendors."""
    tools = {
        i: convert_part(entry, Tool, f"tools[{i}]", ignore_unknown=ignore_unknown)
        for i, entry in enumerate(body.tools or ())
        if not is_vendors(entry.get("type"))
    }
    offered = {f"tools[{i}].function": tool.function for i, tool in tools.items()}
    ask = partial(tool_use, offered, names=Names(chosen="tool_choice.function.name"))
    if not isinstance(body.tool_choice, NamedToolChoice):
        return ask(body.tool_choice or "auto", is_parallel=body.parallel_tool_calls is not False)
    name = body.tool_choice.function.name
    return ask("required", only=[name], is_parallel=False)


def _parameters(function: FunctionDefinition, path: str, field: str) -> dict[str, Any]:
    """Checked, and the name as well."""
    if not _NAME.fullmatch(function.name):
        raise RequestError(
            f"{path}.name: the name of a tool must be 1 to 128 of the characters A-Z, a-z, 0-9, "
            f"_ - . : and /, got {function.name!r}",
            param=f"{path}.name",
        )
    parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
    check_parameters(parameters, f"{path}.{field}")
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{path}.{field}.type: the parameters of a tool are of type object, got "
            f"{parameters['type']!r}",
            param=f"{path}.{field}.type",
        )
    return parameters


def _template_tool(function: FunctionDefinition, parameters: dict[str, Any]) -> dict[str, Any]:
    told = {"name": function.name, "description": function.description, "parameters": parameters}
    told = {key: value for key, value in told.items() if value is not None}
    return {"type": "function", "function": told}
