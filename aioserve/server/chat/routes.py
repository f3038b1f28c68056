"""POST /v1/chat/completions: a conversation in, the assistant's reply out.

Knows the shape of that endpoint; the chat template is the engine's, admission and streaming
are in `generation`, what becomes of the reply's text in `reply`.
"""

from functools import partial
from typing import Literal

import msgspec
from aiohttp import web

from aioserve.engine import Conversation
from aioserve.errors import RequestError
from aioserve.params import MAX_LOGPROBS, NO_DEFAULTS, SamplingDefaults, SamplingParams
from aioserve.server.chat.binding import bind_off_loop, blame, leaves_room_for_reasoning
from aioserve.server.chat.chat_format import CHAT_FORMAT
from aioserve.server.chat.messages import template_messages
from aioserve.server.chat.protocol import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from aioserve.server.chat.reply import ChatReply
from aioserve.server.chat.thinking import with_budget
from aioserve.server.chat.tool_use import chat_tool_use
from aioserve.server.generation import read_body, respond
from aioserve.server.images import IMAGES, ImageParts
from aioserve.server.keys import ENGINE
from aioserve.server.openapi import GENERATION_ERRORS, Route
from aioserve.server.passed_over import pass_over_tools
from aioserve.server.protocol import ErrorResponse
from aioserve.server.validation import BodyDecoder

decoder = BodyDecoder(ChatCompletionRequest, "chat")
# What the engine calls the rendered messages, and other fields.
_NAMES = {"prompt": "messages", "thinking_budget": "thinking_token_budget"}


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """The handler. Raises what `add_request` raises, before anything is sent."""
    body = await read_body(request, decoder)
    engine, chat_format = request.app[ENGINE], request.app[CHAT_FORMAT]
    pass_over_tools(request, body.tools)
    use = chat_tool_use(body, ignore_unknown=engine.config.server.ignore_unknown_fields)
    if use is not None:
        chat_format.call_parser  # noqa: B018 - refuses tools that no reply could call
    params = msgspec.structs.replace(
        sampling_params(body, engine.sampling_defaults, engine.config.server.default_chat_tokens),
        kept_special_tokens=chat_format.kept_special_tokens,
    )
    images = ImageParts.of(engine)
    conversation = Conversation(
        template_messages(body.messages, images),
        use.tools if use else (),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        reasoning_effort=body.reasoning_effort,
        verbosity=body.verbosity,
    )
    body.messages.clear()  # images that they hold would stay as long as the stream
    has_reasoning = leaves_room_for_reasoning(params, use)
    try:
        params = await bind_off_loop(params, use, chat_format, conversation, body.bound_by)
        if has_reasoning:
            budget = body.thinking_token_budget
            params = with_budget(request, params, budget, "thinking_token_budget")
        reply = ChatReply(request, body, use, separates_reasoning=has_reasoning)
        with images.named():
            prompt = request.app[IMAGES].shown(conversation, images)
            return await respond(request, body, [prompt], params, reply)
    except RequestError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        blame(error, use, body.bound_by)
        raise


def sampling_params(
    body: ChatCompletionRequest,
    defaults: SamplingDefaults = NO_DEFAULTS,
    default_max_tokens: int | None = None,
) -> SamplingParams:
    """As `GenerationRequest.sampling_params`, from the names that chat uses."""
    make = partial(
        body.sampling_params,
        logprobs=_logprobs(body),
        defaults=defaults,
        default_max_tokens=default_max_tokens,
    )
    limit = body.max_completion_tokens
    if limit is None:
        return make(body.max_tokens)
    if body.max_tokens not in (None, limit):
        raise RequestError(
            "max_tokens and max_completion_tokens are two names of one limit; they differ",
            param="max_completion_tokens",
        )
    if limit < (1 if body.prompt_logprobs is None else 0):
        raise RequestError(
            f"max_completion_tokens must be at least 1, got {limit}", param="max_completion_tokens"
        )
    return make(limit)


def _logprobs(body: ChatCompletionRequest) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return top if body.logprobs else None


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation.",
        ChatCompletion,
        body=decoder,
        example={"messages": [{"role": "user", "content": "Who's there?"}], "max_tokens": 8},
        events=(ChatCompletionChunk, ErrorResponse, Literal["[DONE]"]),
        raises=GENERATION_ERRORS,
    ),
)
