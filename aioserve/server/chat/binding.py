"""What binds a reply: a call that is forced, a schema of its content, or schemas of its own calls.

Knows how both become one grammar, behind reasoning if there is any. Knows nothing about how
grammars are compiled.
"""

import asyncio
from typing import Any

import msgspec

from aioserve.engine import Conversation
from aioserve.errors import UNREADABLE, RequestError
from aioserve.formats import Function, json_rule
from aioserve.grammar_schema import for_grammar, place_of
from aioserve.params import SamplingParams, StructuredOutputs
from aioserve.server.chat.chat_format import ChatFormat
from aioserve.server.chat.tool_use import ToolUse

_ANY_OBJECT = {"type": "object"}


class NamedFault(RequestError):
    """What no grammar can keep to, with the field that the client sent as `param`."""


async def bind_off_loop(
    params: SamplingParams,
    use: ToolUse | None,
    chat_format: ChatFormat,
    conversation: Conversation,
    field: str | None = None,
) -> SamplingParams:
    """As `bind`, in a thread if there is anything to bind: rules of large schemas take long, and
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
                schema = for_grammar(schema, closes_objects=chat_format.closes_objects)
            except ValueError as error:
                param = field or f"structured_outputs.{wanted.way}"
                raise NamedFault(f"{param}: {error}", param=param) from error
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
        schema = for_grammar(function.parameters, closes_objects=chat_format.closes_objects)
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
        if place := place_of(reason, function.parameters):
            error.param = f"{use.paths[function.name]}.{place}"
            error.args = (f"{error.param}: {reason}",)
            return


def leaves_room_for_reasoning(params: SamplingParams, use: ToolUse | None) -> bool:
    """Whether a reply is free, or bound to what may follow reasoning, and not all of its text."""
    wanted = params.structured_outputs
    return wanted is None or _schema(wanted) is not None or (use is not None and use.must_call)


def _schema(wanted: StructuredOutputs) -> dict[str, Any] | None:
    """The JSON schema that is asked for; None if it is something else."""
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
