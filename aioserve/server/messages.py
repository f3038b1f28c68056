"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

Knows the shape of these endpoints; the chat template is the engine's, admission and streaming are
in `generation`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter

import msgspec
from aiohttp import web

from aioserve.errors import RequestError
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.server.anthropic_protocol import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    CountTokensRequest,
    InputTokens,
    Message,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    Stop,
    TextBlock,
    TextDelta,
)
from aioserve.server.body import decode_body
from aioserve.server.errors import to_messages_error, to_wire
from aioserve.server.generation import Answer, respond
from aioserve.server.keys import ENGINE
from aioserve.server.protocol import Usage
from aioserve.server.sse import typed_event
from aioserve.server.unserved import (
    HINTS_ON_MESSAGES,
    NOT_ON_MESSAGES,
    UNSERVED_ANTHROPIC,
)
from aioserve.server.validation import BodyDecoder

_create = BodyDecoder(
    MessagesRequest, NOT_ON_MESSAGES, shared=UNSERVED_ANTHROPIC, hints=HINTS_ON_MESSAGES
)
_count = BodyDecoder(CountTokensRequest, {}, shared=UNSERVED_ANTHROPIC, hints=HINTS_ON_MESSAGES)
_encoder = msgspec.json.Encoder()

# What the engine and the sampling parameters call fields that have other names here.
_NAMES = {"prompt": "messages", "stop": "stop_sequences", "user": "metadata.user_id"}


async def create_message(request: web.Request) -> web.StreamResponse:
    """The handler of /v1/messages. Raises what `add_request` raises, before anything is sent."""
    body = await decode_body(request, _create)
    with _own_names():
        params = body.sampling_params()
        prompt = template_messages(body)
        return await respond(request, body, [prompt], params, MessageAnswer(request, body))


async def count_tokens(request: web.Request) -> web.Response:
    """The handler of /v1/messages/count_tokens. There may be more than the model takes."""
    body = await decode_body(request, _count)
    with _own_names():
        token_ids = await request.app[ENGINE].tokenize(template_messages(body))
    return web.Response(
        body=_encoder.encode(InputTokens(input_tokens=len(token_ids))),
        content_type="application/json",
    )


@contextmanager
def _own_names() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


def template_messages(body: CountTokensRequest) -> list[dict[str, str]]:
    """What the chat template gets to see; messages of one role in a row become one.

    Raises `RequestError` for anything but text.
    """
    if not body.messages:
        raise RequestError("messages must not be empty", param="messages")
    said = [
        (message.role, _text(message.content, f"messages[{i}].content"))
        for i, message in enumerate(body.messages)
    ]
    if said[-1][0] == "assistant":
        raise RequestError(
            "the last message must be the user's: a reply that goes on from given text is not "
            "supported by this server",
            param=f"messages[{len(said) - 1}].role",
        )
    messages = [
        {"role": str(role), "content": "\n".join(text for _, text in turns)}
        for role, turns in groupby(said, key=itemgetter(0))
    ]
    if body.system:
        messages.insert(0, {"role": "system", "content": _text(body.system, "system")})
    return messages


def _text(content: str | list[Block], path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, f"{path}[{i}]") for i, block in enumerate(content))


def _block_text(block: Block, path: str) -> str:
    if block.type != "text":
        raise RequestError(
            f"{path}: blocks of type {block.type!r} are not supported by this server, only 'text'",
            param=path,
        )
    for name in block.__struct_fields__:
        if name not in ("type", "text", "cache_control") and getattr(block, name):
            raise RequestError(
                f"{path}.{name} is not supported by this server", param=f"{path}.{name}"
            )
    if block.text is None:
        raise RequestError(f"{path}.text is missing", param=f"{path}.text")
    return block.text


class MessageAnswer(Answer):
    """One block of text; the first delta opens message and block."""

    id_prefix = "msg"
    text_field = "text"

    def __init__(self, request: web.Request, body: MessagesRequest) -> None:
        super().__init__(request, body.model, body.request_id)
        self._max_tokens = body.max_tokens
        self._is_open = False
        self._stop = Stop()

    def make_chunk(self, index: int, output: RequestOutput) -> bytes:
        events = b"" if self._is_open else self._opening(output)
        if output.text:
            events += typed_event(BlockDelta(index=0, delta=TextDelta(text=output.text)))
        if output.finish_reason is not None:
            self._stop = self._stop_of(output)
        return events

    def _opening(self, output: RequestOutput) -> bytes:
        self._is_open = True
        usage = Usage.of(
            output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens
        )
        message = Message(id=self.id, model=self.model, content=[], usage=MessageUsage.of(usage))
        return (
            typed_event(MessageStart(message=message))
            + typed_event(BlockStart(index=0, content_block=TextBlock(text="")))
            + typed_event(Ping())
        )

    def ending(self, usage: Usage) -> bytes:
        return (
            typed_event(BlockStop(index=0))
            + typed_event(MessageDelta(delta=self._stop, usage=MessageUsage.of(usage)))
            + typed_event(MessageStop())
        )

    def failure(self, error: BaseException) -> bytes:
        status, body = to_wire(error)
        return typed_event(to_messages_error(status, body.error)[1])

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Message:
        [output] = outputs
        stop = self._stop_of(output)
        return Message(
            id=self.id,
            model=self.model,
            content=[TextBlock(text=output.text)],
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=MessageUsage.of(usage),
        )

    def _stop_of(self, output: RequestOutput) -> Stop:
        match output.finish_reason:
            case FinishReason.STOP if isinstance(output.stop_reason, str):
                return Stop(stop_reason="stop_sequence", stop_sequence=output.stop_reason)
            case FinishReason.STOP:
                return Stop(stop_reason="end_turn")
            case FinishReason.LENGTH if output.num_output_tokens < self._max_tokens:
                return Stop(stop_reason="model_context_window_exceeded")
            case FinishReason.LENGTH:
                return Stop(stop_reason="max_tokens")
        return Stop(stop_reason=output.finish_reason)
