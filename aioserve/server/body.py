"""From an HTTP request to a decoded body that is meant for this server.

What every route with a body shares. Knows nothing about what the body asks for.
"""

import asyncio
from typing import TypeVar

from aiohttp import hdrs, web

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


def _check_type(request: web.Request) -> None:
    """A browser lets any page send the types of forms and bodies without one, unasked. Raises
    `HTTPUnsupportedMediaType` for what is not declared to be JSON.
    """
    declared = request.headers.get(hdrs.CONTENT_TYPE)
    kind = request.content_type  # without parameters such as a charset
    if declared is None or not (kind == "application/json" or kind.endswith("+json")):
        got = "no Content-Type" if declared is None else f"{declared[:64]!r}"
        raise web.HTTPUnsupportedMediaType(
            reason=f"the body must have Content-Type application/json, got {got}; with curl: "
            "-H 'Content-Type: application/json'"
        )


async def decode_body(request: web.Request, decoder: BodyDecoder[T]) -> T:
    """The decoded body. Raises `RequestError`; `UnknownModelError` for a model that is not here;
    `HTTPUnsupportedMediaType` for a body that is not declared to be JSON.
    """
    if request.can_read_body:
        _check_type(request)
    engine = request.app[ENGINE]
    ignore_unknown = engine.config.server.ignore_unknown_fields
    body = decoder.decode(await _read(request), ignore_unknown=ignore_unknown)
    if isinstance(body, ModelRequest) and body.model is not None:
        engine.adapters.check_name(body.model)
    return body
