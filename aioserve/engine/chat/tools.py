"""Which tools a request offers, and what binds the reply to a call or a schema: for every API.

Knows what can be meant by tools and schemas. Knows nothing about how models write calls, nor how a
protocol wraps its tools.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from aioserve.engine.chat.chat_format import ChatFormat
from aioserve.engine.chat.reply_format import Function
from aioserve.engine.prompt import Conversation
from aioserve.errors import UNREADABLE, RequestError
from aioserve.params import SamplingParams, StructuredOutputs
from aioserve.support.parts import load

# What every way to write calls can tell from what stands around it.
_NAME = re.compile(r"[\w.:/\-]{1,128}", re.ASCII)
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

Choice = Literal["none", "auto", "required"]


class SchemaRules(Protocol):
    """The rules for schemas of what compiles them to grammars."""

    def check_finite(self, schema: Mapping[str, Any]) -> None:
        """Raises `ValueError` for a schema of which no value is finite."""

    def for_grammar(self, schema: Mapping[str, Any], *, closes_objects: bool) -> dict[str, Any]:
        """Return the schema as a grammar keeps to it. Raises `ValueError` that names the place."""

    def place_of(self, reason: str, schema: Any) -> str:
        """Return where in the schema is what a reason names; empty if it names no place."""


@cache
def schema_rules() -> SchemaRules:
    """Return what is known of schemas, loaded with the first of them."""
    rules: SchemaRules = load("grammars", "schemas")
    return rules


async def before_tools(tools: Sequence[Any] | None) -> None:
    """Load what checks the schemas of tools, in a thread, before the first of them are read."""
    if tools and not schema_rules.cache_info().currsize:
        await asyncio.to_thread(schema_rules)


class OfferedFunction(Protocol):
    """A function that a request offers, in the struct of its protocol."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str | None: ...
    @property
    def parameters(self) -> dict[str, Any] | None: ...  # a JSON schema; None: it takes none
    @property
    def strict(self) -> bool | None: ...  # whether calls that are not forced keep to the schema


class _OpenAI(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of what callers give as OpenAI's API has it."""


class FunctionDefinition(_OpenAI, kw_only=True):
    """A function that the model may call, with the schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; null: the function takes none
    strict: bool | None = None  # forced calls always are


class OfferedTool(_OpenAI, kw_only=True):
    """One tool of a request; every tool is a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(_OpenAI, kw_only=True):
    """The name of the function that a tool choice forces."""

    name: str


class NamedToolChoice(_OpenAI, kw_only=True):
    """A `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    function: FunctionName


class Names(NamedTuple):
    """The names that a protocol gives its parts, for error messages to its clients."""

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
    offered: Mapping[str, OfferedFunction],
    choice: Choice,
    *,
    only: Sequence[str] | None = None,
    is_parallel: bool = True,
    names: Names = OWN_NAMES,
) -> ToolUse | None:
    """Return what is asked for, with calls of those named in `only`, if it is given; None if no
    tool may be called. `offered` is by the path of each function in the body. Raises
    `RequestError`.

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


def _parameters(function: OfferedFunction, path: str, field: str) -> dict[str, Any]:
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


def _template_tool(function: OfferedFunction, parameters: dict[str, Any]) -> dict[str, Any]:
    told = {"name": function.name, "description": function.description, "parameters": parameters}
    told = {key: value for key, value in told.items() if value is not None}
    return {"type": "function", "function": told}


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


def check_parameters(schema: Any, path: str) -> None:
    """Raises `RequestError` for what is no schema, and for one of which no value is finite."""
    from aioserve.engine.chat.tool_schemas import check_schema

    check_schema(schema, path)
    try:
        schema_rules().check_finite(schema)
    except ValueError as error:
        raise RequestError(f"{path}: {error}", param=path) from error


# What binds a reply: a call that is forced, a schema of its content, or schemas of its own calls.
# Knows how both become one grammar, behind reasoning if there is any. Knows nothing about how
# grammars are compiled.


_ANY_OBJECT = {"type": "object"}


class NamedFault(RequestError):
    """A request that no grammar can keep to, with the field that the client sent as `param`."""


async def bind_off_loop(
    params: SamplingParams,
    use: ToolUse | None,
    chat_format: ChatFormat,
    conversation: Conversation,
    field: str | None = None,
) -> SamplingParams:
    """Do as `bind`, in a thread if there is anything to bind: rules of large schemas take long, and
    the chat template may have to be asked whether it begins to reason.
    """
    is_free = use is None or not (use.is_bound or use.must_call)
    if is_free and params.structured_outputs is None:
        return params
    return await asyncio.to_thread(bind, params, use, chat_format, conversation, field)


def bind(
    params: SamplingParams,
    use: ToolUse | None,
    chat_format: ChatFormat,
    conversation: Conversation,
    field: str | None = None,
) -> SamplingParams:
    """`params` with all that the reply is bound to, by `field` if not by `structured_outputs`.

    Raises `RequestError` for what `structured_outputs` asks beside tools and is no JSON, schemas
    that no grammar can keep to, and tools whose schemas make more rules than can be compiled.
    """
    wanted = params.structured_outputs
    if use is None and (wanted is None or not chat_format.tells_apart):
        return params
    if use is not None and use.is_bound and not use.must_call and wanted is None:
        functions = [
            _sayable(f, use, chat_format)
            if f.is_strict
            else msgspec.structs.replace(f, parameters=_ANY_OBJECT)
            for f in use.functions
        ]
        free = chat_format.free_grammar(functions, conversation)
        return params if free is None else _bound(params, free)
    rules, kinds = [], []
    if use is not None and (use.must_call or wanted is not None):
        kinds.append("calls")
        functions = [_sayable(f, use, chat_format) for f in use.functions]
        rules.append(chat_format.call_rules(functions, is_parallel=use.is_parallel))
    if wanted is not None and not (use and use.must_call):
        schema = _schema(wanted)
        if schema is not None:
            kinds.append("answer")
            try:
                schema = schema_rules().for_grammar(
                    schema, closes_objects=chat_format.closes_objects
                )
            except ValueError as error:
                param = field or f"structured_outputs.{wanted.way}"
                raise NamedFault(f"{param}: {error}", param=param) from error
            from aioserve.engine.chat.reply_grammar import json_rule

            rules += chat_format.answer_rules(json_rule(schema))
        elif use is None:
            return params  # it is the whole text that is bound
        else:
            raise NamedFault(
                f"structured_outputs.{wanted.way} leaves no room for the calls of tools: bind the "
                "content to JSON, or set tool_choice to none",
                param=f"structured_outputs.{wanted.way}",
            )
    if not rules:
        return params
    before, thought_rules = chat_format.thought(conversation)
    reply = " | ".join(kinds)
    return _bound(params, "\n".join([f"start: {before}({reply})", *thought_rules, *rules]))


def _bound(params: SamplingParams, grammar: str) -> SamplingParams:
    return msgspec.structs.replace(params, structured_outputs=StructuredOutputs(grammar=grammar))


def _sayable(function: Function, use: ToolUse, chat_format: ChatFormat) -> Function:
    """`function` with its schema as a grammar keeps to it. Raises `RequestError`."""
    try:
        schema = schema_rules().for_grammar(
            function.parameters, closes_objects=chat_format.closes_objects
        )
    except ValueError as error:
        path = use.paths[function.name]
        raise NamedFault(f"{path}: {error}", param=path) from error
    return msgspec.structs.replace(function, parameters=schema)


def blame(error: RequestError, use: ToolUse | None, field: str | None) -> None:
    """Where a grammar is at fault, let the error name what the client sent and asked for that: the
    tools, or else `field`; None if that is `structured_outputs` itself.
    """
    param = error.param or ""
    if not param.startswith("structured_outputs") or isinstance(error, NamedFault):
        return
    if use is None and field is None:
        return
    reason = str(error).removeprefix(f"{param}: ")
    if use is None:
        error.param, error.args = field, (f"{field}: {reason}",)
        return
    error.param, what = "tools", "the tools" if field is None else f"the tools or {field}"
    error.args = (f"{what} cannot be compiled: {reason}",)
    for function in use.functions:
        if place := schema_rules().place_of(reason, function.parameters):
            error.param = f"{use.paths[function.name]}.{place}"
            error.args = (f"{error.param}: {reason}",)
            return


def leaves_room_for_reasoning(params: SamplingParams, use: ToolUse | None) -> bool:
    """Return whether a reply is free, or bound to what may follow reasoning, and not all of its
    text.
    """
    wanted = params.structured_outputs
    return wanted is None or _schema(wanted) is not None or (use is not None and use.must_call)


def _schema(wanted: StructuredOutputs) -> dict[str, Any] | None:
    """Return the JSON schema that is asked for; None if it is something else."""
    if wanted.json_object:
        return {"type": "object"}
    if not isinstance(wanted.json, str):
        return wanted.json
    try:
        return msgspec.json.decode(wanted.json, type=dict[str, Any])
    except UNREADABLE as error:
        raise RequestError(
            f"structured_outputs.json is no JSON object: {error}", param="structured_outputs.json"
        ) from error
