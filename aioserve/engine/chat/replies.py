"""Chats of Python callers: what they ask as a prompt and parameters, and what the reply says.

What `AsyncEngine.chat` is made of. Reads replies by the formats that the server reads them by.
Knows no HTTP.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, cast

import msgspec

from aioserve.engine.chat.chat_format import ChatFormat
from aioserve.engine.chat.reply_format import Arguments, Call, Content, Event, Reasoning
from aioserve.engine.chat.reply_reader import ReplyReader
from aioserve.engine.chat.tools import (
    FunctionDefinition,
    NamedToolChoice,
    Names,
    OfferedTool,
    ToolUse,
    before_tools,
    bind_off_loop,
    blame,
    leaves_room_for_reasoning,
    template_call,
    tool_use,
)
from aioserve.engine.language_model import (
    NOT_ENDED,
    ChatOptions,
    ChatOutput,
    Messages,
    RequestFields,
    T,
    Tool,
    ToolCall,
    ToolChoice,
    parse,
    schema_of,
    tool_of,
)
from aioserve.engine.prompt import Conversation
from aioserve.errors import RequestError
from aioserve.outputs import RequestOutput
from aioserve.params import SamplingParams, StructuredOutputs
from aioserve.support.reasoning_tokens import PROMPT_END_TOKENS
from aioserve.support.tokens import TokenBytes
from aioserve.support.whole_texts import check_params

_OF_CHATS = ChatOptions.__annotations__.keys() - RequestFields.__annotations__
_NAMES = {"prompt": "messages", "template_kwargs": "chat_template_kwargs"}


async def prepare_chat(
    chat_format: ChatFormat,
    messages: Messages,
    params: SamplingParams,
    options: "ChatOptions[T]",
) -> "tuple[Chat[T], RequestFields]":
    """Return a chat that can be sent, and the fields of its request. Raises `RequestError` that
    names the argument.
    """
    check_params(params)
    tools, kind = options.get("tools") or (), options.get("response_type")
    await before_tools(tools)
    use = _tool_use(tools, options.get("tool_choice", "auto"))
    if use is not None:
        chat_format.call_parser  # noqa: B018 - refuses tools that no reply could call
    field = None
    if kind is not None:
        if params.structured_outputs is not None:
            words = "give response_type or structured_outputs, not both"
            raise RequestError(words, param="response_type")
        field, wanted = "response_type", StructuredOutputs(json=schema_of(kind))
        params = msgspec.structs.replace(params, structured_outputs=wanted)
    params = params.with_checked(kept_special_tokens=chat_format.kept_special_tokens)
    conversation = Conversation(
        template_messages(messages),
        use.tools if use else (),
        template_kwargs=options.get("chat_template_kwargs") or {},
        reasoning_effort=options.get("reasoning_effort"),
    )
    separates = leaves_room_for_reasoning(params, use)
    try:
        params = await bind_off_loop(params, use, chat_format, conversation, field)
    except RequestError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        blame(error, use, field)
        raise
    fields = {name: value for name, value in options.items() if name not in _OF_CHATS}
    chat = Chat(chat_format, conversation, params, use, kind, separates_reasoning=separates)
    return chat, cast(RequestFields, fields)


class Chat(Generic[T]):
    """One chat of a Python caller, to be sent as a request, and read."""

    def __init__(
        self,
        chat_format: ChatFormat,
        conversation: Conversation,
        params: SamplingParams,
        use: ToolUse | None,
        response_type: type[T] | None,
        *,
        separates_reasoning: bool,
    ) -> None:
        """The request is `conversation` with `params`. `use` are the tools that it may call."""
        self.conversation, self.params = conversation, params
        self._format, self._use, self._type = chat_format, use, response_type
        self._pieces = TokenBytes(chat_format.tokenizer)
        self._separates = separates_reasoning
        self._readers: dict[int, ReplyReader] = {}  # by sample
        self._texts: dict[int, list[str]] = {}  # by sample, what was said so far

    def read(self, output: RequestOutput, prompt_token_ids: Sequence[int]) -> ChatOutput[T]:
        """Return what an output of the request says. Outputs of one sample come in their order."""
        reader = self._readers.get(output.index)
        if reader is None:
            reader = self._readers[output.index] = ReplyReader.of(
                self._format,
                self._use,
                prompt_token_ids[-PROMPT_END_TOKENS:],
                self._pieces,
                separates_reasoning=self._separates,
                holds_calls=True,
            )
        events = reader.read(output)
        told: ChatOutput[T] = ChatOutput(**msgspec.structs.asdict(output))
        told.text = "".join(each.text for each in events if isinstance(each, Content))
        told.reasoning = "".join(each.text for each in events if isinstance(each, Reasoning))
        told.tool_calls = _calls(events)
        told.finish_reason = reader.finish_reason(output)
        if self._type is not None:
            said = self._texts.setdefault(output.index, [])
            said.append(told.text)
            if told.finished:
                parse(told, "".join(said), self._type)
            else:
                told.unparsed = NOT_ENDED
        return told


def _calls(events: Sequence[Event]) -> list[ToolCall]:
    """Return the calls among events, which have each call and its arguments together."""
    calls: list[ToolCall] = []
    for event in events:
        if isinstance(event, Call):
            calls.append(ToolCall(event.id or "", event.name, {}))
        elif isinstance(event, Arguments):
            calls[-1].arguments.update(msgspec.json.decode(event.text, type=dict[str, Any]))
    return calls


def _tool_use(tools: Sequence[Tool], choice: ToolChoice) -> ToolUse | None:
    given: dict[str, FunctionDefinition] = {}
    for i, tool in enumerate(tools):
        try:
            given[f"tools[{i}].function"] = msgspec.convert(tool_of(tool), OfferedTool).function
        except msgspec.ValidationError as error:
            raise RequestError(f"tools[{i}]: {error}", param=f"tools[{i}]") from None
    names = Names(chosen="tool_choice.function.name")
    if isinstance(choice, Mapping):
        try:
            name = msgspec.convert(choice, NamedToolChoice).function.name
        except msgspec.ValidationError as error:
            raise RequestError(f"tool_choice: {error}", param="tool_choice") from None
        return tool_use(given, "required", only=[name], is_parallel=False, names=names)
    if choice not in ("none", "auto", "required"):
        raise RequestError(
            f"tool_choice must be none, auto, required or a mapping, got {choice!r:.80}",
            param="tool_choice",
        )
    return tool_use(given, choice, names=names)


def template_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as chat templates know them: arguments of calls as mappings, and answers of
    tools with the name of what was called. Raises `RequestError` for what is no message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            f"messages must be a list of messages, got {messages!r:.80}", param="messages"
        )
    names: dict[str, str] = {}  # of the functions that were called, by the ids of the calls
    told = []
    for i, given in enumerate(messages):
        if not isinstance(given, Mapping):
            words = f'messages[{i}] must have "role" and "content", got {given!r:.80}'
            raise RequestError(words, param="messages")
        message = {"content": None, **given}
        try:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [_template_call(call) for call in calls]
                names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        except (KeyError, TypeError) as error:
            raise RequestError(
                f"messages[{i}].tool_calls must hold calls with id and function, which has name "
                f"and arguments; missing or wrong: {error}",
                param="messages",
            ) from None
        if message.get("role") == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
        told.append(message)
    return told


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return template_call(call["id"], function["name"], arguments)
