"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

This module contains the HTTP handlers, writes replies as messages and events, and converts messages
and tools to those of chat templates; what no template can show is refused, with its place. The
chat template is the engine's; `generation` admits and streams requests; `formats` knows how a model
writes calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web

from aioserve.apis.anthropic.protocol import (
    UNSIGNED,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    CountTokensRequest,
    InputDelta,
    InputMessage,
    InputTokens,
    Message,
    MessageDelta,
    MessagesError,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputConfig,
    Ping,
    ReplyBlock,
    SignatureDelta,
    Source,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolChoice,
    ToolDefinition,
    ToolUseBlock,
    to_messages_error,
)
from aioserve.engine import Conversation
from aioserve.engine.chat.reply_reader import ReplyReader, read_events
from aioserve.engine.chat.tools import (
    Choice,
    FunctionDefinition,
    Names,
    ToolUse,
    before_tools,
    bind_off_loop,
    blame,
    tool_use,
)
from aioserve.errors import RequestError
from aioserve.features.formats import Arguments, Call, Content, Event, Reasoning
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.request import CACHE_SECONDS
from aioserve.server.body import (
    GENERATION_ERRORS,
    NOT_NOW_ERRORS,
    BodyDecoder,
    Route,
    convert_part,
    decode_body,
    json_response,
    refuse_all_but,
)
from aioserve.server.chat.routes import with_budget
from aioserve.server.errors import to_wire
from aioserve.server.fields import is_vendors, note_ttl, pass_over_tools
from aioserve.server.generation import Answer, respond, typed_event
from aioserve.server.images import IMAGES, ImageParts, Part, content_of, joined, text_part
from aioserve.server.protocol import Usage
from aioserve.server.running import CHAT_FORMAT, ENGINE, TOKEN_TEXTS
from aioserve.server.tokenization import preparing

create_decoder = BodyDecoder(MessagesRequest, "messages")
count_decoder = BodyDecoder(CountTokensRequest, "messages")

# What the engine, the sampling parameters and chat call fields that have other names here.
_NAMES = {
    "prompt": "messages",
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
}


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer /v1/messages. Raises what `add_request` raises, before anything is sent."""
    body = await decode_body(request, create_decoder)
    await before_tools(body.tools)
    images = ImageParts.of(request.app[ENGINE])
    with _own_names(body, _ignores_unknown(request)), images.named():
        conversation, use = _conversation(request, body, images)
        note_ttl(request, body.cache_controls())
        body.messages.clear()  # images that they hold would stay as long as the stream
        params = body.sampling_params(
            request.app[ENGINE].model_info.sampling_defaults
        ).with_checked(kept_special_tokens=request.app[CHAT_FORMAT].kept_special_tokens)
        params = await bind_off_loop(
            params, use, request.app[CHAT_FORMAT], conversation, body.bound_by
        )
        budget = None if body.thinking is None else body.thinking.budget()
        if request.app[CHAT_FORMAT].thinking is not None:  # others keep to any budget
            params = with_budget(request, params, budget, "thinking.budget_tokens")
        answer = MessageAnswer(request, body, use)
        prompt = request.app[IMAGES].shown(conversation, images)
        return await respond(request, body, [prompt], params, answer)


async def count_tokens(request: web.Request) -> web.Response:
    """Answer /v1/messages/count_tokens. There may be more than the model takes."""
    body = await decode_body(request, count_decoder)
    await before_tools(body.tools)
    images = ImageParts.of(request.app[ENGINE])
    with _own_names(body, _ignores_unknown(request)), images.named():
        body.sampling_params(
            request.app[ENGINE].model_info.sampling_defaults
        )  # refuses what no reply takes
        conversation, _ = _conversation(request, body, images)
        note_ttl(request, body.cache_controls())
        async with preparing(request, images):
            prompt = await request.app[IMAGES].show(conversation, images)
            token_ids = await request.app[ENGINE].tokenize(prompt)
    return json_response(InputTokens(input_tokens=len(token_ids)))


def _conversation(
    request: web.Request, body: CountTokensRequest, images: ImageParts
) -> tuple[Conversation, ToolUse | None]:
    pass_over_tools(request, body.tools)
    ignore_unknown = _ignores_unknown(request)
    messages, use = template_messages(body, images), tools_of(body, ignore_unknown=ignore_unknown)
    config, is_begun = body.output_config or OutputConfig(), body.messages[-1].role == "assistant"
    if is_begun and body.format is not None:
        raise RequestError(
            "output_config.format is for a whole reply: the last message must not be the "
            "assistant's",
            param="output_config.format",
        )
    if use is not None:
        request.app[CHAT_FORMAT].call_parser  # noqa: B018 - refuses tools that no reply could call
    return Conversation(
        messages,
        use.tools if use else (),
        continue_final_message=is_begun,
        template_kwargs=body.chat_template_kwargs or {},
        reasoning_effort=config.effort,
    ), use


def _ignores_unknown(request: web.Request) -> bool:
    return request.app[ENGINE].config.server.ignore_unknown_fields


@contextmanager
def _own_names(body: CountTokensRequest, ignore_unknown: bool) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        if (error.param or "").startswith("structured_outputs"):
            blame(error, tools_of(body, ignore_unknown=ignore_unknown), body.bound_by)
        names = _NAMES | ({} if body.stop_sequences is None else {"stop": "stop_sequences"})
        if body.metadata is not None:
            names["user"] = "metadata.user_id"
        error.param = names.get(error.param or "", error.param)
        raise


ROUTES = (
    Route(
        "POST",
        "/v1/messages",
        create_message,
        "Answer a conversation, as Anthropic's protocol has it.",
        Message,
        body=create_decoder,
        example={"messages": [{"role": "user", "content": "Who's there?"}], "max_tokens": 8},
        events=(
            MessageStart,
            BlockStart,
            Ping,
            BlockDelta,
            BlockStop,
            MessageDelta,
            MessageStop,
            MessagesError,
        ),
        raises=GENERATION_ERRORS,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Count the tokens that such a conversation has.",
        InputTokens,
        body=count_decoder,
        example={"messages": [{"role": "user", "content": "Who's there?"}]},
        raises=NOT_NOW_ERRORS,  # with images, which take time
    ),
)


# A reply as Anthropic's message: its text told apart into blocks of text, thinking and tool use.
# Knows the shapes of messages and events. How a model writes calls is known in `formats`.


class MessageAnswer(Answer):
    """The first delta opens the message; a block is opened when there is something to say in it."""

    id_prefix = "msg_"
    text_field = "text"

    def __init__(self, request: web.Request, body: MessagesRequest, use: ToolUse | None) -> None:
        super().__init__(request, body.model, body.request_id)
        self._format = request.app[CHAT_FORMAT]
        self._use = use
        self._tells_thoughts = body.thinking is not None and body.thinking.is_told
        self._max_tokens = body.max_tokens
        self._config = request.app[ENGINE].config
        # Whether a reply is text and nothing else.
        self._is_plain = use is None and not self._format.tells_apart
        self._pieces = request.app[TOKEN_TEXTS].bytes
        self._reader: ReplyReader | None = None
        self._is_begun = False
        self._index = -1  # of the last block
        self._block: ReplyBlock | None = None  # the one that is open, empty
        self._stop = Stop()

    async def begin(self) -> None:
        if not self._is_plain:
            self._reader = ReplyReader.of(
                self._format,
                self._use,
                self.prompt_end,
                self._pieces,
                includes_reasoning=self._tells_thoughts,
                holds_calls=True,
            )

    def quick_chunk(self, index: int, output: RequestOutput) -> bytes | None:
        if self._is_plain:
            return super().quick_chunk(index, output)
        if not self._is_begun or output.finish_reason is not None:
            return None
        return self.chunk(index, output)

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        if self._is_plain:
            return super().chunk(index, output)
        return b"" if self.is_silent(output) else self.make_chunk(index, output)

    def make_chunk(self, index: int, output: RequestOutput) -> bytes:
        told = b"" if self._is_begun else self._beginning(output)
        told += b"".join(map(self._tell, read_events(self._reader, output)))
        if output.finish_reason is not None:
            self._stop = self._stop_of(output)
        return told

    def _beginning(self, output: RequestOutput) -> bytes:
        self._is_begun = True
        usage = Usage.of(
            output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens
        )
        message = Message(id=self.id, model=self.model, content=[], usage=self._usage(usage))
        told = typed_event(MessageStart(message=message)) + typed_event(Ping())
        return told + self._open(TextBlock()) if self._is_plain else told

    def _usage(self, usage: Usage) -> MessageUsage:
        cache, seconds = self._config.cache, self.hints.get(CACHE_SECONDS)
        keeps = cache.enable_prefix_caching and self._config.scheduler.max_client_leased_share > 0
        if not keeps or isinstance(seconds, bool | str | None):
            return MessageUsage.of(usage)
        return MessageUsage.of(usage, seconds, cache.block_size)

    def _tell(self, event: Event) -> bytes:
        """Return what opens the block of the event, if it is another than the open one, and the
        delta.
        """
        match event:
            case Content():
                opening = b"" if isinstance(self._block, TextBlock) else self._open(TextBlock())
                return opening + self._delta(TextDelta(text=event.text))
            case Reasoning():
                is_open = isinstance(self._block, ThinkingBlock)
                opening = b"" if is_open else self._open(ThinkingBlock())
                return opening + self._delta(ThinkingDelta(thinking=event.text))
            case Call():
                return self._open(ToolUseBlock(id=event.id or "", name=event.name))
            case Arguments():
                return self._delta(InputDelta(partial_json=event.text))

    def _open(self, block: ReplyBlock) -> bytes:
        closing = self._close()
        self._index, self._block = self._index + 1, block
        return closing + typed_event(BlockStart(index=self._index, content_block=block))

    def _close(self) -> bytes:
        block, self._block = self._block, None
        if block is None:
            return b""
        last = self._delta(SignatureDelta()) if isinstance(block, ThinkingBlock) else b""
        return last + typed_event(BlockStop(index=self._index))

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta) -> bytes:
        return typed_event(BlockDelta(index=self._index, delta=delta))

    def ending(self, usage: Usage) -> bytes:
        return (
            self._close()
            + typed_event(MessageDelta(delta=self._stop, usage=self._usage(usage)))
            + typed_event(MessageStop())
        )

    def failure(self, error: BaseException) -> bytes:
        status, body = to_wire(error)
        return typed_event(to_messages_error(status, body.error)[1])

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Message:
        [output] = outputs
        events = read_events(self._reader, output)
        stop = self._stop_of(output)
        return Message(
            id=self.id,
            model=self.model,
            content=[TextBlock(text=output.text)] if self._is_plain else self._blocks(events),
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=self._usage(usage),
        )

    def _blocks(self, events: Sequence[Event]) -> list[ReplyBlock]:
        blocks: list[ReplyBlock] = []
        for event in events:
            match event:
                case Content():
                    blocks.append(TextBlock(text=event.text))
                case Reasoning():
                    blocks.append(ThinkingBlock(thinking=event.text, signature=UNSIGNED))
                case Call():
                    blocks.append(ToolUseBlock(id=event.id or "", name=event.name))
                case Arguments():
                    call = blocks[-1]
                    assert isinstance(call, ToolUseBlock)
                    call.input = msgspec.json.decode(event.text)
        return blocks

    def _stop_of(self, output: RequestOutput) -> Stop:
        reason = output.finish_reason
        if self._reader is not None:
            reason = self._reader.finish_reason(output)
        match reason:
            case FinishReason.TOOL_CALLS:
                return Stop(stop_reason="tool_use")
            case FinishReason.STOP if isinstance(output.stop_reason, str):
                return Stop(stop_reason="stop_sequence", stop_sequence=output.stop_reason)
            case FinishReason.STOP:
                return Stop(stop_reason="end_turn")
            case FinishReason.LENGTH if output.num_output_tokens < self._max_tokens:
                return Stop(stop_reason="model_context_window_exceeded")
            case FinishReason.LENGTH:
                return Stop(stop_reason="max_tokens")
        return Stop(stop_reason=reason)


# Messages and tools as chat templates know them.


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
