"""Tools of type `custom`, whose input is any text: told to the model as functions with one text.

Knows both shapes. Knows neither items nor events of responses.
"""

import msgspec

from aioserve.errors import UNREADABLE
from aioserve.server.chat.tool_structs import FunctionDefinition
from aioserve.server.responses.protocol import CustomTool

_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def as_function(tool: CustomTool) -> FunctionDefinition:
    """The function that the model is told of. A grammar of the input is told in words."""
    told = [tool.description or ""]
    if definition := (tool.format or {}).get("definition"):
        told.append(f"The input keeps to this grammar:\n{definition}")
    description = "\n\n".join(filter(None, told))
    return FunctionDefinition(
        name=tool.name, description=description or None, parameters=_PARAMETERS
    )


def arguments_of(text: str) -> str:
    """The arguments, as JSON text, of a call whose input is `text`."""
    return msgspec.json.encode({"input": text}).decode()


def input_of(arguments: str) -> str:
    """The input that a call's arguments hold; if they are no such object, they are the input."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])["input"]
    except (*UNREADABLE, KeyError):
        return arguments
