"""The wire structs of tools, and of the choice among them, as chat has them.

Requests refuse unknown fields, as all do. Knows nothing about HTTP or the engine.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from aioserve.server.request_part import RequestPart


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
