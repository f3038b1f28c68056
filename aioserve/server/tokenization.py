"""POST /tokenize and /detokenize, as vLLM has them: texts or conversations to token ids, and back.

This module contains the HTTP handlers; the engine has the tokenizer and the chat template.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from aiohttp import web

from aioserve.engine import Conversation, Prompt
from aioserve.engine.chat.tools import before_tools
from aioserve.errors import EngineDeadError, RequestError
from aioserve.server.access.gate import entered
from aioserve.server.body import NOT_NOW_ERRORS, BodyDecoder, Route, decode_body, json_response
from aioserve.server.chat.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    ToolEntry,
    template_messages,
)
from aioserve.server.chat.routes import chat_tool_use
from aioserve.server.images import IMAGES, ImageParts
from aioserve.server.protocol import Int, ModelRequest
from aioserve.server.running import ENGINE


class TokenizeRequest(ModelRequest, kw_only=True):
    """Body of POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # of a prompt; default true
    return_token_strs: bool | None = None
    # Of messages, as on chat.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolEntry] | None = None


class Tokenized(msgspec.Struct, kw_only=True):
    """The response of POST /tokenize: the token ids of a prompt, and how many there are."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None  # as the vocabulary spells them


class DetokenizeRequest(ModelRequest, kw_only=True):
    """The JSON body of POST /detokenize: token ids to turn into text."""

    tokens: list[Int]


class Detokenized(msgspec.Struct, kw_only=True):
    """The response of POST /detokenize: the text of the token ids."""

    prompt: str


tokenize_decoder = BodyDecoder(TokenizeRequest, "tokenize")
_OF_MESSAGES = ("continue_final_message", "chat_template_kwargs", "tools")
detokenize_decoder = BodyDecoder(DetokenizeRequest)


@asynccontextmanager
async def preparing(request: web.Request, images: ImageParts) -> AsyncIterator[None]:
    """Inside the block images are brought and prepared, though for no tokens: like a request's,
    they count for its key, and for the queue. Raises `EngineOverloadedError`.
    """
    if not images:
        yield
        return
    async with entered(request), request.app[ENGINE].arriving():
        yield


@contextmanager
def naming(field: str, *, of_engine: str) -> Iterator[None]:
    """Inside the block, errors of the engine's that name its argument `of_engine` name the `field`
    of the body that it was made of. Not needed where both have one name.
    """
    try:
        yield
    except RequestError as error:
        if error.param == of_engine:
            error.param = field
        raise


async def tokenize(request: web.Request) -> web.Response:
    """Answer /tokenize. There may be more tokens than the model takes."""
    body = await decode_body(request, tokenize_decoder)
    engine = request.app[ENGINE]
    special = body.add_special_tokens is not False
    images = ImageParts.of(engine)
    await before_tools(body.tools)
    prompt = _prompt(body, images, engine.config.server.ignore_unknown_fields)
    field = "prompt" if body.messages is None else "messages"
    with naming(field, of_engine="prompt"), images.named():
        async with preparing(request, images):
            if isinstance(prompt, Conversation):
                prompt = await request.app[IMAGES].show(prompt, images)
            token_ids = await engine.tokenize(prompt, add_special_tokens=special)
    answer = Tokenized(count=len(token_ids), max_model_len=engine.max_model_len, tokens=token_ids)
    if body.return_token_strs:
        answer.token_strs = engine.model_info.tokenizer.convert_ids_to_tokens(token_ids)
    return json_response(answer)


def _prompt(body: TokenizeRequest, images: ImageParts, ignore_unknown: bool) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either a prompt or messages", param="prompt")
    if body.prompt is not None:
        for name in _OF_MESSAGES:
            if getattr(body, name):
                raise RequestError(f"{name} is for messages, not for a prompt", param=name)
        return body.prompt
    messages = template_messages(body.messages or [], images)
    if body.add_special_tokens:
        raise RequestError(
            "add_special_tokens is for a prompt: the chat template of messages decides this",
            param="add_special_tokens",
        )
    asked = ChatCompletionRequest(messages=[], tools=body.tools)
    use = chat_tool_use(asked, ignore_unknown=ignore_unknown)
    return Conversation(
        messages,
        use.tools if use else (),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
    )


async def detokenize(request: web.Request) -> web.Response:
    """Answer /detokenize. Special tokens are in the text."""
    body = await decode_body(request, detokenize_decoder)
    return json_response(Detokenized(prompt=await request.app[ENGINE].detokenize(body.tokens)))


ROUTES = (
    Route(
        "POST",
        "/tokenize",
        tokenize,
        "The tokens of a text or a conversation.",
        Tokenized,
        body=tokenize_decoder,
        example={"prompt": "Who's there?"},
        raises=NOT_NOW_ERRORS,  # with images, which take time
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        "The text of tokens.",
        Detokenized,
        body=detokenize_decoder,
        example={"tokens": [5, 6]},
        raises=(EngineDeadError,),
    ),
)
