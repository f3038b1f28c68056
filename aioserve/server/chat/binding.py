"""What binds a reply: a call that is forced, a schema of its content, or schemas of its own calls.

Knows how both become one grammar, behind reasoning if there is any. Knows nothing about how
grammars are compiled.
"""

import asyncio
from typing import Any

import msgspec

from aioserve.engine import Conversation
from aioserve.errors import UNREADABLE, RequestError
from aioserve.formats import json_rule
from aioserve.sampling_params import SamplingParams
from aioserve.server.chat.chat_format import ChatFormat
from aioserve.server.chat.tool_use import ToolUse
from aioserve.structured_outputs import StructuredOutputs

_ANY_OBJECT = {"type": "object"}


async def bind_off_loop(
    params: SamplingParams,
    use: ToolUse | None,
    chat_format: ChatFormat,
    conversation: Conversation,
) -> SamplingParams:
    """As `bind`, in a thread if there is anything to bind: rules of large schemas take long, and
    the chat template may have to be asked whether it begins to reason.
    """
    is_free = use is None or not (use.is_bound or use.must_call)
    if is_free and params.structured_outputs is None:
        return params
    return await asyncio.to_thread(bind, params, use, chat_format, conversation)


def bind(
    params: SamplingParams,
    use: ToolUse | None,
    chat_format: ChatFormat,
    conversation: Conversation,
) -> SamplingParams:
    """`params` with all that the reply is bound to.

    Raises `RequestError` for what `structured_outputs` asks beside tools and is no JSON, and for
    tools whose schemas make more rules than can be compiled.
    """
    wanted = params.structured_outputs
    if use is None and (wanted is None or not chat_format.tells_apart):
        return params
    if use is not None and use.is_bound and not use.must_call and wanted is None:
        functions = [
            f if f.is_strict else msgspec.structs.replace(f, parameters=_ANY_OBJECT)
            for f in use.functions
        ]
        free = chat_format.free_grammar(functions, conversation)
        return params if free is None else _bound(params, free)
    rules, kinds = [], []
    if use is not None and (use.must_call or wanted is not None):
        kinds.append("calls")
        rules.append(chat_format.call_rules(use.functions, is_parallel=use.is_parallel))
    if wanted is not None and not (use and use.must_call):
        schema = _schema(wanted)
        if schema is not None:
            kinds.append("answer")
            rules += chat_format.answer_rules(json_rule(schema))
        elif use is None:
            return params  # it is the whole text that is bound
        else:
            raise RequestError(
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


def blame(error: RequestError, has_tools: bool, field: str | None) -> None:
    """Where a grammar is at fault, let it name what asked for that: the tools, or else `field`."""
    field = "tools" if has_tools else field
    if field is not None and (error.param or "").startswith("structured_outputs"):
        what = "the tools" if has_tools else field
        error.param, error.args = field, (f"{what} cannot be compiled: {error}",)


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
