"""/v1/responses: OpenAI's Responses API, and what it remembers.

This module contains the HTTP handlers. The chat template is the engine's; `generation` admits and
streams requests; `answer` makes items of the reply's text.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web

from aioserve.apis.responses.answer import ResponseAnswer
from aioserve.apis.responses.prompt import Offered, template_turns, tools_of
from aioserve.apis.responses.protocol import (
    Deleted,
    DeltaEvent,
    DoneEvent,
    ErrorEvent,
    InputItem,
    InputPart,
    InputTokens,
    ItemEvent,
    ItemList,
    Page,
    PartEvent,
    Response,
    ResponseEvent,
    ResponsesRequest,
    Whole,
)
from aioserve.engine import Conversation
from aioserve.engine.chat.tools import ToolUse, before_tools, bind_off_loop, blame
from aioserve.errors import RequestError, RequestIdInUseError
from aioserve.server.access.gate import reach_of
from aioserve.server.body import (
    GENERATION_ERRORS,
    NOT_NOW_ERRORS,
    BodyDecoder,
    Route,
    decode_body,
    decode_query,
    json_response,
)
from aioserve.server.chat.routes import with_budget
from aioserve.server.errors import UnknownResponseError
from aioserve.server.fields import pass_over_tools
from aioserve.server.generation import respond
from aioserve.server.images import IMAGES, ImageParts
from aioserve.server.protocol import RequestPart
from aioserve.server.running import CHAIN, CHAT_FORMAT, ENGINE, RESPONSES, Kept
from aioserve.server.tokenization import preparing


class _Said(msgspec.Struct):
    """The messages of a response that is kept, with which a next one goes on."""

    output: list[InputItem]


decoder = BodyDecoder(ResponsesRequest, "responses")
_items = msgspec.json.Decoder(list[InputItem])
_said = msgspec.json.Decoder(_Said)

# What the engine, the sampling parameters and chat call fields that have other names here.
_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "thinking_budget": "thinking_token_budget",
}


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer POST. Raises what `add_request` raises, before anything is sent."""
    body, chat_format = await decode_body(request, decoder), request.app[CHAT_FORMAT]
    engine = request.app[ENGINE]
    images = ImageParts.of(engine)
    offered = await _offered(request, body)
    with _own_names(offered.use, body), images.named():
        await _check_id(request, body)
        params = body.sampling_params(
            engine.model_info.sampling_defaults, engine.config.server.default_chat_tokens
        ).with_checked(kept_special_tokens=chat_format.kept_special_tokens)
        items, conversation = await _conversation(request, body, offered.use, images)
        params = await bind_off_loop(params, offered.use, chat_format, conversation, body.bound_by)
        params = with_budget(request, params, *body.reasoning_budget())
        answer = ResponseAnswer(request, body, offered, params, items)
        del items  # images that they hold would stay as long as the stream
        prompt = request.app[IMAGES].shown(conversation, images)
        return await respond(request, body, [prompt], params, answer)


async def count_input_tokens(request: web.Request) -> web.Response:
    """Answer POST /v1/responses/input_tokens. There may be more than the model takes."""
    body = await decode_body(request, decoder)
    images = ImageParts.of(request.app[ENGINE])
    use = (await _offered(request, body)).use
    with _own_names(use, body), images.named():
        engine = request.app[ENGINE]
        body.sampling_params(
            engine.model_info.sampling_defaults, None
        )  # refuses what no reply takes
        _, conversation = await _conversation(request, body, use, images)
        async with preparing(request, images):
            prompt = await request.app[IMAGES].show(conversation, images)
            token_ids = await engine.tokenize(prompt)
    return json_response(InputTokens(input_tokens=len(token_ids)))


async def _offered(request: web.Request, body: ResponsesRequest) -> Offered:
    pass_over_tools(request, body.tools)
    await before_tools(body.tools)
    ignore_unknown = request.app[ENGINE].config.server.ignore_unknown_fields
    offered = tools_of(body, ignore_unknown=ignore_unknown)
    if offered.use is not None:
        request.app[CHAT_FORMAT].call_parser  # noqa: B018 - refuses tools that no reply could call
    return offered


async def _conversation(
    request: web.Request, body: ResponsesRequest, use: ToolUse | None, images: ImageParts
) -> tuple[list[InputItem], Conversation]:
    """Return all items up to the reply, and what the chat template gets to see of them."""
    before = await _before(request, body)
    items = [*before, *_input(body)]
    return items, Conversation(
        template_turns(items, images, len(before), body.instructions),
        use.tools if use else (),
        template_kwargs=body.chat_template_kwargs or {},
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        verbosity=None if body.text is None else body.text.verbosity,
    )


async def _check_id(request: web.Request, body: ResponsesRequest) -> None:
    """Raise `RequestIdInUseError` for the id of a response that is stored."""
    if body.request_id is not None:
        if await request.app[RESPONSES].get(body.request_id) is not None:
            raise RequestIdInUseError(f"a response {body.request_id[:128]!r} is stored")


async def _before(request: web.Request, body: ResponsesRequest) -> list[InputItem]:
    """Return all that was said up to the end of the response that this one goes on with."""
    if body.previous_response_id is None:
        return []
    kept = await request.app[RESPONSES].get(body.previous_response_id)
    if kept is None or not kept.is_for(reach_of(request)):
        raise RequestError(
            f"no response {body.previous_response_id[:128]!r} is stored here: it was never stored "
            "(store: false), or was dropped for newer ones",
            param="previous_response_id",
        )
    request[CHAIN] = kept.chain
    return _items.decode(kept.items) + _said.decode(kept.response).output


def _input(body: ResponsesRequest) -> list[InputItem]:
    if isinstance(body.input, str):
        return [InputItem(role="user", content=body.input)]
    if not body.input:
        raise RequestError("input must not be empty", param="input")
    return body.input


@contextmanager
def _own_names(use: ToolUse | None, body: ResponsesRequest) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        blame(error, use, body.bound_by)
        error.param = _NAMES.get(error.param or "", error.param)
        raise


async def get_response(request: web.Request) -> web.Response:
    """Answer GET. Raises `UnknownResponseError`, and `RequestError` for a wrong query or a stream
    of it.
    """
    kept = await _kept(request)
    if decode_query(request.query, Whole).stream:
        raise RequestError("a stored response is returned whole, not as a stream", param="stream")
    return web.Response(body=kept.response, content_type="application/json")


async def delete_response(request: web.Request) -> web.Response:
    """Answer DELETE. Raises `UnknownResponseError`, and `RequestError` for any query. What went on
    with it is kept.
    """
    await _kept(request)
    decode_query(request.query, RequestPart)
    response_id = request.match_info["id"]
    await request.app[RESPONSES].forget(response_id)
    return json_response(Deleted(id=response_id))


async def list_input_items(request: web.Request) -> web.Response:
    """Answer GET for all that led to a response, the last of it first. Raises
    `UnknownResponseError`, and `RequestError` for a wrong query.
    """
    kept = await _kept(request)
    page = decode_query(request.query, Page)
    items = [_shown(item) for item in _items.decode(kept.items)]
    if page.order == "desc":
        items.reverse()
    if page.after is not None:
        ids = [item.id for item in items]
        if page.after not in ids:
            raise RequestError(f"item {page.after[:128]!r} is not in this list", param="after")
        items = items[ids.index(page.after) + 1 :]
    told = items[: page.limit]
    ends = (told[0].id, told[-1].id) if told else (None, None)
    return json_response(
        ItemList(data=told, first_id=ends[0], last_id=ends[1], has_more=len(told) < len(items))
    )


def _shown(item: InputItem) -> InputItem:
    """Return the item as replies have it: its text as a part, and a status."""
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        item.content = [InputPart(type=kind, text=item.content)]
    item.status = item.status or "completed"
    return item


async def _kept(request: web.Request) -> Kept:
    response_id = request.match_info["id"]
    kept = await request.app[RESPONSES].get(response_id)
    if kept is None or not kept.is_for(reach_of(request)):
        raise UnknownResponseError(f"no response {response_id[:128]!r} is stored here", param="id")
    return kept


ROUTES = (
    Route(
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        "Count the tokens that such a conversation has.",
        InputTokens,
        body=decoder,
        example={"input": "Who's there?"},
        raises=NOT_NOW_ERRORS,  # with images, which take time
    ),
    Route(
        "POST",
        "/v1/responses",
        create_response,
        "Answer a conversation, as OpenAI's newer protocol has it.",
        Response,
        body=decoder,
        example={"input": "Who's there?", "max_output_tokens": 8},
        events=(
            ResponseEvent,
            ItemEvent,
            PartEvent,
            DeltaEvent,
            DoneEvent,
            ErrorEvent,
        ),
        raises=GENERATION_ERRORS,
    ),
    Route(
        "GET",
        "/v1/responses/{id}",
        get_response,
        "A response that is remembered.",
        Response,
        query=Whole,
        raises=(RequestError, UnknownResponseError),
    ),
    Route(
        "GET",
        "/v1/responses/{id}/input_items",
        list_input_items,
        "What led to a response.",
        ItemList,
        query=Page,
        raises=(RequestError, UnknownResponseError),
    ),
    Route(
        "DELETE",
        "/v1/responses/{id}",
        delete_response,
        "Forget a response.",
        Deleted,
        query=RequestPart,
        raises=(RequestError, UnknownResponseError),
    ),
)
