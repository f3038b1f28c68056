"""From an HTTP request to a decoded body that is meant for this server.

What every route with a body shares. Knows nothing about what the body asks for.
"""

import asyncio
from typing import TypeVar

from aiohttp import web

from aioserve.server.errors import BodyTimeoutError
from aioserve.server.keys import ENGINE
from aioserve.server.protocol import ModelRequest, RequestPart
from aioserve.server.validation import BodyDecoder

T = TypeVar("T", bound=RequestPart)


async def _read(request: web.Request) -> bytes:
    """All of it, in time. Raises `HTTPRequestEntityTooLarge`, before it has come if its length is
    told, and `BodyTimeoutError`.
    """
    length, limit = request.content_length, request.client_max_size
    if length is not None and length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, length)
    if request.content.is_eof():
        return await request.read()
    seconds = request.app[ENGINE].config.access.body_timeout
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise BodyTimeoutError(f"the body took more than {seconds:g} s to come") from None


async def decode_body(request: web.Request, decoder: BodyDecoder[T]) -> T:
    """The decoded body. Raises `RequestError`; `UnknownModelError` for a model that is not here."""
    engine = request.app[ENGINE]
    ignore_unknown = engine.config.server.ignore_unknown_fields
    body = decoder.decode(await _read(request), ignore_unknown=ignore_unknown)
    if isinstance(body, ModelRequest) and body.model is not None:
        engine.adapters.check_name(body.model)
    return body
