"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

Knows the shape of these endpoints; the chat template is the engine's, admission and streaming are
in `generation`, what becomes of the reply's text in `answer`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web

from aioserve.engine import Conversation
from aioserve.errors import RequestError
from aioserve.server.anthropic.answer import MessageAnswer
from aioserve.server.anthropic.prompt import template_messages, tools_of
from aioserve.server.anthropic.protocol import (
    BlockDelta,
    BlockStart,
    BlockStop,
    CountTokensRequest,
    InputTokens,
    Message,
    MessageDelta,
    MessagesError,
    MessagesRequest,
    MessageStart,
    MessageStop,
    OutputConfig,
    Ping,
)
from aioserve.server.body import decode_body
from aioserve.server.chat.binding import bind_off_loop, blame
from aioserve.server.chat.chat_format import CHAT_FORMAT
from aioserve.server.chat.thinking import with_budget
from aioserve.server.chat.tool_use import ToolUse
from aioserve.server.generation import respond
from aioserve.server.images import IMAGES, ImageParts
from aioserve.server.keys import ENGINE
from aioserve.server.openapi import GENERATION_ERRORS, NOT_NOW_ERRORS, Route
from aioserve.server.passed_over import pass_over_tools
from aioserve.server.tokenization import preparing
from aioserve.server.validation import BodyDecoder

create_decoder = BodyDecoder(MessagesRequest, "messages")
count_decoder = BodyDecoder(CountTokensRequest, "messages")
_encoder = msgspec.json.Encoder()

# What the engine, the sampling parameters and chat call fields that have other names here.
_NAMES = {
    "prompt": "messages",
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
}


async def create_message(request: web.Request) -> web.StreamResponse:
    """The handler of /v1/messages. Raises what `add_request` raises, before anything is sent."""
    body = await decode_body(request, create_decoder)
    images = ImageParts.of(request.app[ENGINE])
    with _own_names(body, _ignores_unknown(request)), images.named():
        conversation, use = _conversation(request, body, images)
        body.messages.clear()  # images that they hold would stay as long as the stream
        params = msgspec.structs.replace(
            body.sampling_params(request.app[ENGINE].sampling_defaults),
            kept_special_tokens=request.app[CHAT_FORMAT].kept_special_tokens,
        )
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
    """The handler of /v1/messages/count_tokens. There may be more than the model takes."""
    body = await decode_body(request, count_decoder)
    images = ImageParts.of(request.app[ENGINE])
    with _own_names(body, _ignores_unknown(request)), images.named():
        body.sampling_params(request.app[ENGINE].sampling_defaults)  # refuses what no reply takes
        conversation, _ = _conversation(request, body, images)
        async with preparing(request, images):
            prompt = await request.app[IMAGES].show(conversation, images)
            token_ids = await request.app[ENGINE].tokenize(prompt)
    return web.Response(
        body=_encoder.encode(InputTokens(input_tokens=len(token_ids))),
        content_type="application/json",
    )


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
